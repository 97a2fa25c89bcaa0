// Enough of CUDA to run one block of a kernel on a CPU: a thread of the machine for each of the block's.
// Slow, and only for what shuffles, reduces and synchronises with whole warps, as the kernel under test
// does; what it shows is the arithmetic, not the memory model.

#pragma once

#include <atomic>
#include <barrier>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __shared__ static
#define __launch_bounds__(n)

struct Dim {
  unsigned x = 0, y = 0, z = 0;
};
inline thread_local Dim threadIdx;

namespace emulated {
struct Warp {
  std::barrier<> barrier{32};
  uint64_t lanes[32];
};
inline std::vector<Warp*> warps;
inline std::barrier<>* block = nullptr;

// What every lane of the warp puts in, by lane.
template <typename T>
void exchange(T own, T (&all)[32]) {
  static_assert(sizeof(T) <= 8);
  Warp& warp = *warps[threadIdx.x / 32];
  std::memcpy(&warp.lanes[threadIdx.x % 32], &own, sizeof(T));
  warp.barrier.arrive_and_wait();
  for (int lane = 0; lane < 32; ++lane) std::memcpy(&all[lane], &warp.lanes[lane], sizeof(T));
  warp.barrier.arrive_and_wait();
}
}  // namespace emulated

inline void __syncthreads() { emulated::block->arrive_and_wait(); }

inline int __syncthreads_count(bool own) {
  static std::atomic<int> count;
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  count += own;
  __syncthreads();
  const int total = count;
  __syncthreads();
  return total;
}

template <typename T>
T __shfl_sync(unsigned, T own, int from) {
  T all[32];
  emulated::exchange(own, all);
  return all[from & 31];
}

template <typename T>
T __shfl_xor_sync(unsigned, T own, int mask) {
  T all[32];
  emulated::exchange(own, all);
  return all[(threadIdx.x & 31) ^ unsigned(mask)];
}

inline unsigned __ballot_sync(unsigned, bool own) {
  int all[32];
  emulated::exchange(int(own), all);
  unsigned bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= unsigned(all[lane] != 0) << lane;
  return bits;
}

inline bool __all_sync(unsigned mask, bool own) { return __ballot_sync(mask, own) == 0xffffffffu; }
inline bool __any_sync(unsigned mask, bool own) { return __ballot_sync(mask, own) != 0; }

template <typename F>
unsigned reduced(unsigned own, F join) {
  unsigned all[32];
  emulated::exchange(own, all);
  unsigned total = all[0];
  for (int lane = 1; lane < 32; ++lane) total = join(total, all[lane]);
  return total;
}
inline unsigned __reduce_max_sync(unsigned, unsigned own) {
  return reduced(own, [](unsigned a, unsigned b) { return a > b ? a : b; });
}
inline unsigned __reduce_min_sync(unsigned, unsigned own) {
  return reduced(own, [](unsigned a, unsigned b) { return a < b ? a : b; });
}
inline unsigned __reduce_add_sync(unsigned, unsigned own) {
  return reduced(own, [](unsigned a, unsigned b) { return a + b; });
}
inline unsigned __reduce_or_sync(unsigned, unsigned own) {
  return reduced(own, [](unsigned a, unsigned b) { return a | b; });
}

inline unsigned atomicOr(unsigned* at, unsigned value) { return __atomic_fetch_or(at, value, __ATOMIC_RELAXED); }
inline int atomicAdd(int* at, int value) { return __atomic_fetch_add(at, value, __ATOMIC_RELAXED); }
inline unsigned long long atomicAdd(unsigned long long* at, unsigned long long value) {
  return __atomic_fetch_add(at, value, __ATOMIC_RELAXED);
}
inline int __popc(int value) { return __builtin_popcount(unsigned(value)); }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Run `kernel` as one block of `threads` threads.
template <typename Kernel, typename... Arguments>
void launch(int threads, Kernel kernel, Arguments... arguments) {
  std::barrier<> block(threads);
  emulated::block = &block;
  std::vector<emulated::Warp> warps(threads / 32);
  emulated::warps.clear();
  for (auto& warp : warps) emulated::warps.push_back(&warp);
  std::vector<std::thread> running;
  for (int i = 0; i < threads; ++i)
    running.emplace_back([=] {
      threadIdx.x = unsigned(i);
      kernel(arguments...);
    });
  for (auto& thread : running) thread.join();
}
