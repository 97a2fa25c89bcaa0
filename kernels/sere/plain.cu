// SERE in the plain way, as the benchmark's opponent: a launch to clear, one to mark, one in which every
// secondary slot scans all experts by itself. Slots have to come heaviest first. Same constants as
// `reroute.cu`.

extern "C" __global__ void clear(int* reads) {
  if (threadIdx.x < EXPERTS) reads[threadIdx.x] = 0;
}

extern "C" __global__ void mark(const ID_TYPE* ids, int* reads, int rows, int primary) {
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at < rows * primary) reads[ids[at / primary * SLOTS + at % primary]] = 1;
}

extern "C" __global__ void move(ID_TYPE* ids, const int* reads, const float* similarity, int rows, int primary,
                                float threshold) {
  const int at = blockIdx.x * blockDim.x + threadIdx.x, secondary = SLOTS - primary;
  if (at >= rows * secondary) return;
  ID_TYPE& id = ids[at / secondary * SLOTS + primary + at % secondary];
  if (reads[id]) return;
  float best = -1.f;
  int target = -1;
  for (int e = 0; e < EXPERTS; ++e) {
    const float s = similarity[id * EXPERTS + e];
    if (reads[e] && s > best) best = s, target = e;
  }
  if (target >= 0 && best >= threshold) id = target;
}

extern "C" __global__ void nothing() {}
