// The kernel's entry for a CPU; see `cuda_on_cpu.h`.
#include "cuda_on_cpu.h"
// The kernel comes after what stands in for CUDA.
#include "reroute.cu"

extern "C" void run(const Id* ids, const float* weights, const unsigned char* kinds, const short* neighbours,
                    const short* reach, const int* settings, Id* out_ids, float* out_weights, int* counters,
                    const long long* step, long long* calls, const Logit* logits, const float* bias, int rows,
                    int layer, int layers) {
  launch(THREADS, reroute, ids, weights, kinds, neighbours, reach, settings, out_ids, out_weights, counters, step,
         calls, logits, bias, rows, layer, layers);
}
