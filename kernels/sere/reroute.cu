// Expert re-routing of one layer in one launch of one block. Compiled by NVRTC, see `fused.py`, which
// also states what each argument is; `reference.py` states what is computed.
//
// Given by the compiler's command line: EXPERTS, SLOTS (ids of a row), THREADS, ID_TYPE, and how
// the router scores: LOGITS (0 float32, 1 bfloat16, 2 float16) and SIGMOID (0 softmax, 1 sigmoid).

using Id = ID_TYPE;

constexpr int WARPS = THREADS / 32;
constexpr unsigned ALL = 0xffffffffu;

__device__ constexpr int power_of_two(int n) {
  int p = 1;
  while (p < n) p *= 2;
  return p;
}

// Lanes that share a row; a row never crosses a warp.
constexpr int LANES = power_of_two(SLOTS);
constexpr int ROWS_AT_ONCE = THREADS / LANES;
static_assert(SLOTS >= 1 && LANES <= 32, "1 to 32 slots a row");
static_assert(THREADS % 32 == 0 && THREADS >= 32 && THREADS <= 1024, "whole warps");

// Columns of a similarity row that a lane reads, neighbouring ones in one load where they divide.
constexpr int PER_LOAD = EXPERTS % 128 == 0 ? 4 : EXPERTS % 64 == 0 ? 2 : 1;
constexpr int LOADS = (EXPERTS + 32 * PER_LOAD - 1) / (32 * PER_LOAD);

struct alignas(PER_LOAD * sizeof(float)) Columns {
  float at[PER_LOAD];
};

enum Kind { PADDING = 0, PREFILL = 1, DECODE = 2 };
enum Policy { OFF = 0, TOPK = 1, SERE = 2, RANDOM = 3, OEA = 4, XSHARE = 5, LYNX = 6 };

struct Settings {
  int policy, primary, renormalize, budget, seed;
};

#if LOGITS == 0
using Logit = float;
__device__ float read(Logit value) { return value; }
#else
using Logit = unsigned short;
#if LOGITS == 1
__device__ float read(Logit value) { return __uint_as_float(unsigned(value) << 16); }
#else
__device__ float read(Logit value) {
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(value));
  return out;
}
#endif
#endif

// The router's own numbers, of which only some policies have need.
struct Scores {
  const Logit* logits;  // [rows, EXPERTS]
  const float* bias;    // [EXPERTS], added for ranking; 0 where the router has none

  // What weights are made of, up to a factor that a row's experts share.
  __device__ float gate(int row, int expert, float most) const {
    const float logit = read(logits[size_t(row) * EXPERTS + expert]);
    return SIGMOID ? 1.f / (1.f + expf(-logit)) : expf(logit - most);
  }
  // By which experts are ranked: in the order of the router's scores.
  __device__ float choice(int row, int expert) const {
    const float logit = read(logits[size_t(row) * EXPERTS + expert]);
    return SIGMOID ? 1.f / (1.f + expf(-logit)) + bias[expert] : logit + bias[expert];
  }
};

// One slot of one row, as a thread holds it.
struct Slot {
  Id id;
  float weight;
  int kind;
  int rank;
  bool here;  // there is such a slot

  __device__ bool valid() const { return here && id >= 0 && id < EXPERTS; }
};

struct Shared {
  // Each is 0 or 1; plain stores of the same value need no atomics.
  int before[EXPERTS];   // read by decode rows as they came
  int primary[EXPERTS];  // one of the heaviest of a decode row
  int prefill[EXPERTS];  // read by prefill rows
  int after[EXPERTS];    // read by decode rows as they leave
  int fixed[EXPERTS];    // protected
  int target[EXPERTS];   // where secondary slots go
  int allowed[EXPERTS];  // the set of a policy that has one
  int users[EXPERTS];    // slots of decode rows
  unsigned long long mass[EXPERTS];  // of their weights, in units of 2^-32: the same in any order
  float sum[EXPERTS];    // of gate values
  float norm[WARPS];     // of a row's gate values
  int moved;
};

// Rank by weight, heaviest first; ties by expert, then by slot; empty slots last. `rivals` takes whatever
// is no expert for an empty slot, `reference` only what is below 0.
__device__ int rank_of(const Slot& own, int lane, bool strict) {
  const bool empty = own.id < 0 || (strict && own.id >= EXPERTS);
  const float weight = empty ? __uint_as_float(0xff800000u) : own.weight;
  const Id expert = empty && strict ? Id(-1) : own.id;
  const int first = lane & ~(LANES - 1), slot = lane & (LANES - 1);
  int rank = 0;
#pragma unroll
  for (int j = 0; j < SLOTS; ++j) {
    const float w = __shfl_sync(ALL, weight, first + j);
    const Id id = __shfl_sync(ALL, expert, first + j);
    rank += w > weight || (w == weight && (id < expert || (id == expert && j < slot)));
  }
  return rank;
}

__device__ Slot load(const Id* ids, const float* weights, const unsigned char* kinds, int rows, int pass, bool strict) {
  const int row = pass * ROWS_AT_ONCE + int(threadIdx.x) / LANES;
  const int slot = int(threadIdx.x) & (LANES - 1);
  Slot own{-1, 0.f, PADDING, 0, row < rows && slot < SLOTS};
  if (own.here) {
    own.id = ids[row * SLOTS + slot];
    own.weight = weights[row * SLOTS + slot];
    own.kind = kinds[row];
  }
  own.rank = rank_of(own, int(threadIdx.x) & 31, strict);
  return own;
}

__device__ void mark(Shared& s, const Slot& own, int primary) {
  if (!own.valid() || own.kind == PADDING) return;
  if (own.kind == PREFILL) {
    s.prefill[own.id] = 1;
  } else {
    s.before[own.id] = 1;
    if (own.rank < primary) s.primary[own.id] = 1;
  }
}

// A float as an unsigned number of the same order, above 0; -0 counts as 0.
__device__ unsigned ordered(float value) {
  const unsigned bits = __float_as_uint(value + 0.f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// By a warp: the most similar expert that is read anyway, the lowest of equals; -1 if none is.
__device__ int most_similar(const Shared& s, const Columns (&row)[LOADS], int lane, float& best) {
  unsigned key = 0;
  int column = EXPERTS;
#pragma unroll
  for (int i = 0; i < LOADS; ++i) {
#pragma unroll
    for (int k = 0; k < PER_LOAD; ++k) {
      const int e = (i * 32 + lane) * PER_LOAD + k;
      if (e >= EXPERTS || !(s.primary[e] | s.prefill[e])) continue;
      const unsigned own = ordered(row[i].at[k]);
      if (own > key) key = own, column = e;
    }
  }
  const unsigned most = __reduce_max_sync(ALL, key);
  if (most == 0) return -1;
  best = __uint_as_float(most & 0x80000000u ? most & 0x7fffffffu : ~most);
  return int(__reduce_min_sync(ALL, key == most ? unsigned(column) : unsigned(EXPERTS)));
}

__device__ void read_row(Columns (&row)[LOADS], const float* similarity, int expert, int lane) {
  const Columns* at = reinterpret_cast<const Columns*>(similarity + size_t(expert) * EXPERTS);
#pragma unroll
  for (int i = 0; i < LOADS; ++i) {
    const int load = i * 32 + lane;
    if (load * PER_LOAD < EXPERTS) row[i] = at[load];
  }
}

// Find where the experts go that only secondary slots read. Warps take them in turn, several rows of
// similarities on their way at once.
__device__ void search_similar(Shared& s, const float* similarity, float threshold) {
  constexpr int AT_ONCE = LOADS * PER_LOAD <= 8 ? 4 : 2;
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) & 31;
#pragma unroll 1
  for (int base = warp; base < EXPERTS; base += AT_ONCE * WARPS) {
    Columns rows[AT_ONCE][LOADS];
    bool searches[AT_ONCE];
#pragma unroll
    for (int k = 0; k < AT_ONCE; ++k) {
      const int e = base + k * WARPS;
      searches[k] = e < EXPERTS && s.before[e] && !(s.primary[e] | s.prefill[e] | s.fixed[e]);
      if (searches[k]) read_row(rows[k], similarity, e, lane);
    }
#pragma unroll
    for (int k = 0; k < AT_ONCE; ++k) {
      if (!searches[k]) continue;
      float best = 0.f;
      const int v = most_similar(s, rows[k], lane, best);
      if (lane == 0 && v >= 0 && best >= threshold) s.target[base + k * WARPS] = v;
    }
  }
}

// As `reference.topk`: a secondary slot has no weight and its row's heaviest expert.
__device__ void keep_heaviest(Slot& own, int lane, int primary, bool renormalize) {
  const int first = lane & ~(LANES - 1);
  const bool drop = own.kind == DECODE && own.rank >= primary && own.here && own.id >= 0;
  const float kept = drop ? 0.f : own.weight;
  float before = 0.f, after = 0.f;
  Id heaviest = own.id;
  int least = SLOTS;
  bool any = false;
#pragma unroll
  for (int j = 0; j < SLOTS; ++j) {
    before += __shfl_sync(ALL, own.weight, first + j);
    after += __shfl_sync(ALL, kept, first + j);
    any |= __shfl_sync(ALL, int(drop), first + j) != 0;
    const int rank = __shfl_sync(ALL, own.rank, first + j);
    const Id id = __shfl_sync(ALL, own.id, first + j);
    if (rank < least) least = rank, heaviest = id;
  }
  if (drop) own.id = heaviest;
  own.weight = any && renormalize ? kept * (after > 0.f ? before / after : 1.f) : kept;
}

__device__ bool leave(Shared& s, Slot own, const Settings& settings, Id* ids, float* weights, int pass) {
  const Id came = own.id;
  if (settings.policy == TOPK) {
    keep_heaviest(own, int(threadIdx.x) & 31, settings.primary, settings.renormalize);
  } else if (own.kind == DECODE && own.rank >= settings.primary && own.valid()) {
    own.id = s.target[own.id];
  }
  if (!own.here) return false;
  const int row = pass * ROWS_AT_ONCE + int(threadIdx.x) / LANES;
  const int at = row * SLOTS + (int(threadIdx.x) & (LANES - 1));
  ids[at] = own.id;
  weights[at] = own.weight;
  if (own.kind == DECODE && own.valid()) s.after[own.id] = 1;
  return own.id != came;
}

// Of 32-bit numbers to themselves, one to one (splitmix32's finaliser).
__device__ unsigned mix(unsigned x) {
  x = (x ^ (x >> 16)) * 0x21F0AAADu;
  x = (x ^ (x >> 15)) * 0x735A2D97u;
  return x ^ (x >> 15);
}

// As `rivals.random_remap`: an expert goes to the one that draws the smallest number.
__device__ void draw_targets(Shared& s, unsigned seed) {
  for (int u = int(threadIdx.x); u < EXPERTS; u += THREADS) {
    if (!s.before[u] || s.primary[u] | s.prefill[u]) continue;
    const unsigned source = mix(mix(seed) + unsigned(u));
    unsigned least = 0;
    int target = -1;
    for (int v = 0; v < EXPERTS; ++v) {
      const unsigned drawn = mix(source + unsigned(v));
      if ((s.primary[v] | s.prefill[v]) && (target < 0 || drawn < least)) least = drawn, target = v;
    }
    if (target >= 0) s.target[u] = target;
  }
}

__device__ float warp_most(float value) {
  const unsigned most = __reduce_max_sync(ALL, ordered(value));
  return __uint_as_float(most & 0x80000000u ? most & 0x7fffffffu : ~most);
}

__device__ float warp_sum(float value) {
#pragma unroll
  for (int step = 16; step; step /= 2) value += __shfl_xor_sync(ALL, value, step);
  return value;
}

__device__ float row_most(const Scores& scores, int row, int lane) {
  float most = __uint_as_float(0xff800000u);
  if (!SIGMOID)
    for (int e = lane; e < EXPERTS; e += 32) most = fmaxf(most, read(scores.logits[size_t(row) * EXPERTS + e]));
  return warp_most(most);
}

// Sum of every expert's gate values over the decode rows, rows in order.
__device__ void sum_gates(Shared& s, const Scores& scores, const unsigned char* kinds, int rows) {
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) & 31;
  for (int base = 0; base < rows; base += WARPS) {
    // What rows are divided by; a softmax's sum.
    const int own = base + warp;
    float most = 0.f, total = 1.f;
    if (!SIGMOID && own < rows && kinds[own] == DECODE) {
      most = row_most(scores, own, lane);
      total = 0.f;
      for (int e = lane; e < EXPERTS; e += 32) total += scores.gate(own, e, most);
      total = warp_sum(total);
    }
    if (lane == 0) s.norm[warp] = SIGMOID ? 0.f : most + logf(total);
    __syncthreads();
    for (int e = int(threadIdx.x); e < EXPERTS; e += THREADS)
      for (int k = 0; k < WARPS && base + k < rows; ++k)
        if (kinds[base + k] == DECODE) s.sum[e] += scores.gate(base + k, e, s.norm[k]);
    __syncthreads();
  }
}

__device__ void count_users(Shared& s, const Slot& own) {
  if (own.kind != DECODE || !own.valid()) return;
  atomicAdd(&s.users[own.id], 1);
  atomicAdd(&s.mass[own.id], (unsigned long long)(fmaxf(own.weight, 0.f) * 4294967296.f));
}

// The set of experts that decode rows may read, as `rivals` has it.
__device__ void allow(Shared& s, const Settings& settings) {
  for (int e = int(threadIdx.x); e < EXPERTS; e += THREADS) {
    const bool open = s.primary[e] | s.prefill[e];
    if (settings.policy == OEA || open) {
      s.allowed[e] = open;
      continue;
    }
    // How many others are ahead of it, and how many places there are.
    int ahead = 0, taken = 0;
    for (int o = 0; o < EXPERTS; ++o) {
      const bool others = settings.policy == XSHARE ? s.primary[o] | s.prefill[o] : s.prefill[o];
      taken += settings.policy == XSHARE && s.primary[o] && !s.prefill[o];
      if (o == e || others) continue;
      bool before = o < e;
      if (settings.policy == LYNX) {
        if (s.mass[o] != s.mass[e]) before = s.mass[o] > s.mass[e];
        if (s.users[o] != s.users[e]) before = s.users[o] > s.users[e];
      } else if (s.sum[o] != s.sum[e]) {
        before = s.sum[o] > s.sum[e];
      }
      ahead += before;
    }
    s.allowed[e] = ahead < settings.budget - taken;
  }
}

// By a warp, a decode row within the set: as `rivals._reselect`.
__device__ void select_again(Shared& s, const Scores& scores, const Id* ids, const float* weights, Id* out_ids,
                             float* out_weights, int row, int lane) {
  const bool here = lane < SLOTS;
  Id id = here ? ids[row * SLOTS + lane] : Id(-1);
  const float weight = here ? weights[row * SLOTS + lane] : 0.f;
  const bool filled = here && id >= 0 && id < EXPERTS;
  const bool lost = filled && !s.allowed[id];
  const unsigned all_lost = __ballot_sync(ALL, lost);
  if (all_lost) {
    // The heaviest, and what the row holds.
    int rank = 0;
    Id heaviest = id;
    int least = SLOTS + 1;
    const Id ranked = filled ? id : Id(-1);
    const float own = filled ? weight : __uint_as_float(0xff800000u);
    unsigned open[(EXPERTS + 31) / 32];
#pragma unroll
    for (int i = 0; i < (EXPERTS + 31) / 32; ++i) {
      const int e = i * 32 + lane;
      open[i] = e < EXPERTS && s.allowed[e] && scores.choice(row, e) > __uint_as_float(0xff800000u);
    }
    for (int j = 0; j < SLOTS; ++j) {
      const Id other = __shfl_sync(ALL, ranked, j);
      const float w = __shfl_sync(ALL, own, j);
      rank += w > own || (w == own && (other < ranked || (other == ranked && j < lane)));
#pragma unroll
      for (int i = 0; i < (EXPERTS + 31) / 32; ++i)
        if (other >= 0 && int(other) == i * 32 + lane) open[i] = 0;
    }
    for (int j = 0; j < SLOTS; ++j) {
      const int r = __shfl_sync(ALL, rank, j);
      const Id other = __shfl_sync(ALL, id, j);
      if (r < least) least = r, heaviest = other;
    }
    bool served = false;
    for (int j = 0; j < SLOTS; ++j) {
      if (!(all_lost >> j & 1)) continue;
      unsigned key = 0;
      int best = EXPERTS;
#pragma unroll
      for (int i = 0; i < (EXPERTS + 31) / 32; ++i) {
        if (!open[i]) continue;
        const unsigned k = ordered(scores.choice(row, i * 32 + lane));
        if (k > key) key = k, best = i * 32 + lane;
      }
      const unsigned most = __reduce_max_sync(ALL, key);
      const int next = int(__reduce_min_sync(ALL, most && key == most ? unsigned(best) : unsigned(EXPERTS)));
      if (lane == j) id = next < EXPERTS ? Id(next) : heaviest, served = next < EXPERTS;
#pragma unroll
      for (int i = 0; i < (EXPERTS + 31) / 32; ++i)
        if (next == i * 32 + lane) open[i] = 0;
    }
    const bool carries = filled && (served || !lost);
    const float most = row_most(scores, row, lane);
    float gate = carries ? scores.gate(row, int(id), most) : 0.f;
    const float total = warp_sum(filled ? weight : 0.f);
    float sum = warp_sum(gate);
    if (!(sum > 0.f)) {  // all underflow: shared evenly
      gate = carries ? 1.f : 0.f;
      sum = warp_sum(gate);
    }
    if (here) {
      out_ids[row * SLOTS + lane] = id;
      out_weights[row * SLOTS + lane] = filled ? gate * (total / sum) : weight;
    }
  } else if (here) {
    out_ids[row * SLOTS + lane] = id;
    out_weights[row * SLOTS + lane] = weight;
  }
  if (filled) s.after[id] = 1;
  const int moved = __popc(int(all_lost));
  if (lane == 0 && moved) atomicAdd(&s.moved, moved);
}

// All of a step under a policy with a set.
__device__ void within_set(Shared& s, const Settings& settings, const Scores& scores, const Id* ids,
                           const float* weights, const unsigned char* kinds, Id* out_ids, float* out_weights,
                           int rows, int passes) {
  if (settings.policy == XSHARE) sum_gates(s, scores, kinds, rows);
  if (settings.policy == LYNX)
    for (int pass = 0; pass < passes; ++pass) count_users(s, load(ids, weights, kinds, rows, pass, true));
  __syncthreads();
  allow(s, settings);
  __syncthreads();
  const int lane = int(threadIdx.x) & 31;
  for (int row = int(threadIdx.x) / 32; row < rows; row += WARPS) {
    if (kinds[row] == DECODE) {
      select_again(s, scores, ids, weights, out_ids, out_weights, row, lane);
    } else if (lane < SLOTS) {
      out_ids[row * SLOTS + lane] = ids[row * SLOTS + lane];
      out_weights[row * SLOTS + lane] = weights[row * SLOTS + lane];
    }
  }
}

__device__ int count(const int* flags, int lane) {
  int total = 0;
  for (int e = lane; e < EXPERTS; e += 32) total += flags[e];
  return int(__reduce_add_sync(ALL, unsigned(total)));
}

extern "C" __global__ void __launch_bounds__(THREADS) reroute(
    const Id* __restrict__ ids, const float* __restrict__ weights, const unsigned char* __restrict__ kinds,
    const float* __restrict__ similarity, const unsigned char* __restrict__ protection,
    const Settings* __restrict__ given, const float* __restrict__ threshold, Id* __restrict__ out_ids,
    float* __restrict__ out_weights, int* __restrict__ counters, const long long* __restrict__ step,
    long long* __restrict__ calls, const Logit* __restrict__ logits, const float* __restrict__ bias, int rows,
    int layer, int layers) {
  __shared__ Shared s;
  const int thread = int(threadIdx.x);
  const Settings settings = *given;
  const bool moves = settings.policy != OFF && settings.primary < SLOTS;
  const int primary = moves ? settings.primary : SLOTS;
  const bool strict = settings.policy >= OEA;
  const int passes = (rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
  const Slot first = load(ids, weights, kinds, rows, 0, strict);
  for (int e = thread; e < EXPERTS; e += THREADS) {
    s.before[e] = s.primary[e] = s.prefill[e] = s.after[e] = s.users[e] = 0;
    s.mass[e] = 0;
    s.sum[e] = 0.f;
    s.fixed[e] = protection[e];
    s.target[e] = e;
  }
  if (thread == 0) s.moved = 0;
  __syncthreads();
  mark(s, first, primary);
  for (int pass = 1; pass < passes; ++pass) mark(s, load(ids, weights, kinds, rows, pass, strict), primary);
  __syncthreads();
  if (moves && settings.policy >= OEA) {
    within_set(s, settings, Scores{logits, bias}, ids, weights, kinds, out_ids, out_weights, rows, passes);
  } else {
    if (moves && settings.policy == SERE) search_similar(s, similarity, *threshold);
    if (moves && settings.policy == RANDOM) draw_targets(s, unsigned(settings.seed));
    __syncthreads();
    Settings acting = settings;
    if (!moves) acting.policy = OFF, acting.primary = SLOTS;
    int moved = leave(s, first, acting, out_ids, out_weights, 0);
    for (int pass = 1; pass < passes; ++pass)
      moved += leave(s, load(ids, weights, kinds, rows, pass, strict), acting, out_ids, out_weights, pass);
    moved = int(__reduce_add_sync(ALL, unsigned(moved)));
    if ((thread & 31) == 0 && moved) atomicAdd(&s.moved, moved);
  }
  __syncthreads();
  if (thread < 32) {
    const int before = count(s.before, thread), after = count(s.after, thread);
    if (thread == 0) {
      int* at = counters + (size_t(*step) * layers + layer) * 3;
      at[0] = before;
      at[1] = after;
      at[2] = s.moved;
      calls[layer] += 1;
    }
  }
}
