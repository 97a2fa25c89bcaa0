// Expert re-routing of one layer in one launch of one block. Compiled by NVRTC, see `fused.py`, which
// also states what each argument is; `reference.py` and `rivals.py` state what is computed.
//
// Given by the compiler's command line: EXPERTS, SLOTS (ids of a row), THREADS, ID_TYPE, and how
// the router scores: LOGITS (0 float32, 1 bfloat16, 2 float16) and SIGMOID (0 softmax, 1 sigmoid).
//
// What bounds a block like this is how many instructions its one multiprocessor issues to memory, shared or
// not, and how many of them wait for one another. So what comes from memory is asked for at once and by one
// thread, a slot has a thread of its own, and an expert's neighbours come in order of their similarity
// (`fused.neighbours`), so that the first of them that is read anyway is the one sought, and few are looked at.

using Id = ID_TYPE;

constexpr int WARPS = THREADS / 32;
constexpr unsigned ALL = 0xffffffffu;
constexpr int WORDS = (EXPERTS + 31) / 32;

__device__ constexpr int power_of_two(int n) {
  int p = 1;
  while (p < n) p *= 2;
  return p;
}

// Lanes that share a row; a row never crosses a warp.
constexpr int LANES = power_of_two(SLOTS);
constexpr int ROWS_AT_ONCE = THREADS / LANES;
static_assert(SLOTS >= 1 && SLOTS <= 16, "1 to 16 slots a row");
static_assert(THREADS % 32 == 0 && THREADS >= 32 && THREADS <= 1024, "whole warps");

// Threads that share the work on one expert where there are threads enough, neighbours in a warp.
constexpr int PER_EXPERT = THREADS / power_of_two(EXPERTS);
constexpr int SHARE = PER_EXPERT > 32 ? 32 : PER_EXPERT > 1 ? PER_EXPERT : 1;
constexpr int SLICES = SHARE > 8 ? 8 : SHARE;

// Neighbours are looked at 32 at a time: eight lanes for an expert, four neighbours in each.
constexpr int CHUNK = 32;
constexpr int CHUNKS = (EXPERTS + CHUNK - 1) / CHUNK;
// Times that a warp takes four experts; their first neighbours are asked for early if they fit in registers.
constexpr int TURNS = (EXPERTS + 4 * WARPS - 1) / (4 * WARPS);
constexpr int EARLY = TURNS <= 4 ? TURNS : 0;

enum Kind { PADDING = 0, PREFILL = 1, DECODE = 2 };
enum Policy { OFF = 0, TOPK = 1, SERE = 2, RANDOM = 3, OEA = 4, XSHARE = 5, LYNX = 6 };

struct Settings {
  int policy, primary, renormalize, budget, seed;
};

__device__ float infinity() { return __uint_as_float(0x7f800000u); }

// A float as an unsigned number of the same order, above 0; -0 counts as 0.
__device__ unsigned ordered(float value) {
  const unsigned bits = __float_as_uint(value + 0.f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ float unordered(unsigned key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

__device__ float warp_most(float value) { return unordered(__reduce_max_sync(ALL, ordered(value))); }

__device__ float warp_sum(float value) {
#pragma unroll
  for (int step = 16; step; step /= 2) value += __shfl_xor_sync(ALL, value, step);
  return value;
}

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

// What is known of an expert; each is 0 or 1. A byte for each, so that plain stores need no atomics.
struct alignas(4) Flags {
  unsigned char before;   // read by decode rows as they came
  unsigned char primary;  // one of the heaviest of a decode row
  unsigned char prefill;  // read by prefill rows
  unsigned char fixed;    // protected, or without neighbours similar enough

  // Read whatever happens to secondary slots.
  __device__ bool open() const { return primary | prefill; }
  __device__ bool moves() const { return before && !(primary | prefill | fixed); }
};

struct Shared {
  alignas(16) Flags is[EXPERTS];
  alignas(16) unsigned char after[WORDS * 32];  // read by decode rows as they leave
  short target[EXPERTS];                        // where secondary slots go
  short reach[EXPERTS];                         // neighbours that are similar enough
  Settings settings;
  int counted[2];  // experts before and after
  int moved;
  // Of policies with a set.
  unsigned allowed[WORDS];           // a bit for each expert
  int users[EXPERTS];                // slots of decode rows
  unsigned long long mass[EXPERTS];  // of their weights, in units of 2^-32: the same in any order
  unsigned long long key[EXPERTS];   // larger ones fill the set first
  float sum[SLICES][EXPERTS];        // of gate values
  float norm[WARPS];                 // of a row's gate values
  bool counts[WARPS];                // whether a row is of decode
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

// Where a thread's slot is.
__device__ int place(int pass) {
  const int row = pass * ROWS_AT_ONCE + int(threadIdx.x) / LANES;
  return row * SLOTS + (int(threadIdx.x) & (LANES - 1));
}

__device__ Slot fetch(const Id* ids, const float* weights, const unsigned char* kinds, int rows, int pass) {
  const int row = pass * ROWS_AT_ONCE + int(threadIdx.x) / LANES;
  const int slot = int(threadIdx.x) & (LANES - 1);
  Slot own{-1, 0.f, PADDING, 0, row < rows && slot < SLOTS};
  if (own.here) {
    own.id = ids[place(pass)];
    own.weight = weights[place(pass)];
    own.kind = kinds[row];
  }
  return own;
}

// Rank by weight, heaviest first; ties by expert, then by slot; empty slots last. `rivals` takes whatever
// is no expert for an empty slot (`strict`), `reference` only what is below 0.
__device__ int rank_of(const Slot& own, int lane, bool strict) {
  const bool empty = own.id < 0 || (strict && own.id >= EXPERTS);
  const float weight = empty ? -infinity() : own.weight;
  const int first = lane & ~(LANES - 1), slot = lane & (LANES - 1);
  // Routers mostly give slots in order.
  const float left = __shfl_sync(ALL, weight, lane - 1);
  if (__all_sync(ALL, slot == 0 || !own.here || left > weight)) return slot;
  const Id expert = empty && strict ? Id(-1) : own.id;
  int rank = 0;
#pragma unroll
  for (int j = 0; j < SLOTS; ++j) {
    const float w = __shfl_sync(ALL, weight, first + j);
    const Id id = __shfl_sync(ALL, expert, first + j);
    rank += w > weight || (w == weight && (id < expert || (id == expert && j < slot)));
  }
  return rank;
}

__device__ void mark(Shared& s, const Slot& own, int primary) {
  if (!own.valid() || own.kind == PADDING) return;
  Flags& expert = s.is[own.id];
  if (own.kind == PREFILL) {
    expert.prefill = 1;
  } else {
    expert.before = 1;
    if (own.rank < primary) expert.primary = 1;
  }
}

struct alignas(8) Neighbours {
  short at[CHUNK / 8];
};

// The expert that eight lanes look after in a turn; there may be none.
__device__ int expert_of(int turn, int thread) { return (turn * WARPS + thread / 32) * 4 + thread % 32 / 8; }

// Lane l of eight gets numbers l, l + 8, ... of an expert's first chunk.
__device__ void ask(Neighbours& some, const short* neighbours, int expert, int lane) {
  if (expert < EXPERTS) some = reinterpret_cast<const Neighbours*>(neighbours)[expert * CHUNKS * 8 + lane % 8];
}

// By a warp: the nearest neighbour that is read anyway, of one expert and among all.
__device__ void look_everywhere(Shared& s, const short* neighbours, int expert, int reach, int lane) {
  struct alignas(16) Some {
    short at[8];
  };
  constexpr int ALL_OF_THEM = CHUNKS * CHUNK;
  constexpr int LOADS = (ALL_OF_THEM + 255) / 256;
  Some some[LOADS];
#pragma unroll
  for (int i = 0; i < LOADS; ++i)
    if ((i * 32 + lane) * 8 < ALL_OF_THEM)
      some[i] = reinterpret_cast<const Some*>(neighbours)[expert * ALL_OF_THEM / 8 + i * 32 + lane];
  unsigned nearest = ALL_OF_THEM;
  int to = expert;
#pragma unroll
  for (int i = 0; i < LOADS; ++i) {
    if ((i * 32 + lane) * 8 >= ALL_OF_THEM) continue;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const int inside = lane % 4 * 8 + k;  // its chunk, which has four numbers for each of eight lanes
      const unsigned number = unsigned((i * 32 + lane) / 4 * CHUNK + inside % 4 * 8 + inside / 4);
      if (number < unsigned(reach) && number < nearest && s.is[some[i].at[k]].open())
        nearest = number, to = some[i].at[k];
    }
  }
  const unsigned least = __reduce_min_sync(ALL, nearest);
  if (least == ALL_OF_THEM ? lane == 0 : nearest == least) {
    s.target[expert] = short(to);
    s.after[to] = 1;
  }
}

// Where the slots of four experts go: to the nearest neighbour that is read anyway. `first` is a chunk of them.
__device__ void send(Shared& s, const short* neighbours, int expert, const Neighbours& first, int lane) {
  bool looks = expert < EXPERTS && s.is[expert].moves();
  if (!__any_sync(ALL, looks)) return;
  const int reach = looks ? s.reach[expert] : 0;
#pragma unroll
  for (int j = 0; j < CHUNK / 8; ++j) {
    const bool open = looks && j * 8 + lane % 8 < reach && s.is[first.at[j]].open();
    const unsigned found = __ballot_sync(ALL, open) >> (lane & 24) & 0xff;
    if (looks && found) {
      looks = false;
      if (lane % 8 == __ffs(int(found)) - 1) {
        s.target[expert] = first.at[j];
        s.after[first.at[j]] = 1;
      }
    }
    if (!__any_sync(ALL, looks)) return;
  }
  if (looks && reach <= CHUNK && lane % 8 == 0) s.after[expert] = 1;  // stays
  unsigned left = __ballot_sync(ALL, looks && reach > CHUNK && lane % 8 == 0);
  for (; left; left &= left - 1) {
    const int leader = __ffs(int(left)) - 1;
    look_everywhere(s, neighbours, __shfl_sync(ALL, expert, leader), __shfl_sync(ALL, reach, leader), lane);
  }
}

// Of 32-bit numbers to themselves, one to one (splitmix32's finaliser).
__device__ unsigned mix(unsigned x) {
  x = (x ^ (x >> 16)) * 0x21F0AAADu;
  x = (x ^ (x >> 15)) * 0x735A2D97u;
  return x ^ (x >> 15);
}

// As `rivals.random_remap`: an expert goes to the one that draws the smallest number.
__device__ void draw_targets(Shared& s, unsigned seed) {
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) & 31;
  for (int u = warp; u < EXPERTS; u += WARPS) {
    if (!s.is[u].before || s.is[u].open()) continue;
    const unsigned source = mix(mix(seed) + unsigned(u));
    unsigned least = ALL, target = EXPERTS;
    for (int v = lane; v < EXPERTS; v += 32) {
      const unsigned drawn = mix(source + unsigned(v));
      if (s.is[v].open() && drawn <= least) least = drawn, target = unsigned(v);
    }
    const unsigned all = __reduce_min_sync(ALL, least);
    const unsigned to = __reduce_min_sync(ALL, least == all ? target : unsigned(EXPERTS));
    if (lane == 0) {
      s.target[u] = short(to < EXPERTS ? to : u);
      s.after[to < EXPERTS ? to : u] = 1;
    }
  }
}

// Which experts are read afterwards because their slots stay; whoever moves slots marks where they go.
__device__ void keep(Shared& s, const Settings& settings, bool moves, int thread) {
  for (int e = thread; e < EXPERTS; e += THREADS) {
    const Flags is = s.is[e];
    const bool stays = !moves                       ? is.before
                       : settings.policy == TOPK    ? is.primary
                       : settings.policy == SERE    ? is.before && !is.moves()
                                                    : is.before && is.open();
    if (stays) s.after[e] = 1;
  }
}

// As `reference.topk`: a secondary slot has no weight and its row's heaviest expert.
__device__ void keep_heaviest(Slot& own, int lane, int primary, bool renormalize) {
  const bool drop = own.kind == DECODE && own.rank >= primary && own.here && own.id >= 0;
  const unsigned row = (LANES == 32 ? ALL : (1u << LANES) - 1) << (lane & ~(LANES - 1));
  const unsigned drops = __ballot_sync(ALL, drop) & row;
  const unsigned leads = __ballot_sync(ALL, own.here && own.rank == 0) & row;
  const Id heaviest = __shfl_sync(ALL, own.id, leads ? __ffs(int(leads)) - 1 : lane);
  const float kept = drop ? 0.f : own.weight;
  float before = own.weight, after = kept;
#pragma unroll
  for (int step = LANES / 2; step; step /= 2) {
    before += __shfl_xor_sync(ALL, before, step);
    after += __shfl_xor_sync(ALL, after, step);
  }
  if (drop) own.id = heaviest;
  own.weight = drops && renormalize ? kept * (after > 0.f ? before / after : 1.f) : kept;
}

__device__ void leave(Shared& s, Slot own, const Settings& settings, bool moves, Id* ids, float* weights, int pass) {
  const int lane = int(threadIdx.x) & 31;
  const Id came = own.id;
  if (moves && settings.policy == TOPK) {
    keep_heaviest(own, lane, settings.primary, settings.renormalize);
  } else if (moves && own.kind == DECODE && own.rank >= settings.primary && own.valid()) {
    own.id = s.target[own.id];
  }
  if (own.here) ids[place(pass)] = own.id;
  // Those of the first pass have been written before, if nothing changes them.
  if (own.here && (pass > 0 || (moves && settings.policy == TOPK))) weights[place(pass)] = own.weight;
  const int moved = __popc(int(__ballot_sync(ALL, own.id != came)));
  if (lane == 0 && moved) atomicAdd(&s.moved, moved);
}

__device__ float row_most(const Scores& scores, int row, int lane) {
  float most = -infinity();
  if (!SIGMOID)
    for (int e = lane; e < EXPERTS; e += 32) most = fmaxf(most, read(scores.logits[size_t(row) * EXPERTS + e]));
  return warp_most(most);
}

// Sums of every expert's gate values over the decode rows, in slices of a fixed order.
__device__ void sum_gates(Shared& s, const Scores& scores, const unsigned char* kinds, int rows) {
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) & 31;
  for (int base = 0; base < rows; base += WARPS) {
    // What a row is divided by: a softmax's sum, by way of its logarithm.
    const int own = base + warp;
    const bool counts = own < rows && kinds[own] == DECODE;
    float most = 0.f, total = 1.f;
    if (!SIGMOID && counts) {
      most = row_most(scores, own, lane);
      total = 0.f;
      for (int e = lane; e < EXPERTS; e += 32) total += scores.gate(own, e, most);
      total = warp_sum(total);
    }
    if (lane == 0) {
      s.norm[warp] = SIGMOID ? 0.f : most + logf(total);
      s.counts[warp] = counts;
    }
    __syncthreads();
    for (int item = int(threadIdx.x); item < EXPERTS * SLICES; item += THREADS) {
      const int e = item % EXPERTS, slice = item / EXPERTS;
      float sum = 0.f;
#pragma unroll 4
      for (int k = slice; k < WARPS; k += SLICES)
        if (s.counts[k]) sum += scores.gate(base + k, e, s.norm[k]);
      s.sum[slice][e] += sum;
    }
    __syncthreads();
  }
}

__device__ void count_users(Shared& s, const Slot& own) {
  if (own.kind != DECODE || !own.valid()) return;
  atomicAdd(&s.users[own.id], 1);
  atomicAdd(&s.mass[own.id], (unsigned long long)(fmaxf(own.weight, 0.f) * 4294967296.f));
}

// In which order experts fill the set; 0 for those that take no place of the budget.
__device__ unsigned long long key_of(const Shared& s, const Settings& settings, int e) {
  const Flags is = s.is[e];
  if (settings.policy == LYNX) {
    constexpr unsigned long long MOST = (1ull << 49) - 1;
    const unsigned long long mass = s.mass[e] < MOST ? s.mass[e] : MOST;
    return is.prefill ? 0 : (1ull << 63) | (unsigned long long)s.users[e] << 49 | mass;
  }
  float sum = 0.f;
  for (int slice = 0; slice < SLICES; ++slice) sum += s.sum[slice][e];
  return is.open() ? 0 : ordered(sum);
}

// The set of experts that decode rows may read, as `rivals` has it.
__device__ void allow(Shared& s, const Settings& settings) {
  if (settings.policy != OEA) {
    for (int e = int(threadIdx.x); e < EXPERTS; e += THREADS) s.key[e] = key_of(s, settings, e);
    __syncthreads();
  }
  for (int item = int(threadIdx.x); item < power_of_two(EXPERTS) * SHARE; item += THREADS) {
    const int e = item / SHARE;
    const bool own = e < EXPERTS;
    bool in = own && s.is[e].open();
    if (settings.policy != OEA) {
      // How many others are ahead of it, and how many places are taken.
      const unsigned long long key = own ? s.key[e] : ~0ull;
      int ahead = 0, taken = 0;
      if (own)
        for (int o = item % SHARE; o < EXPERTS; o += SHARE) {
          const unsigned long long other = s.key[o];
          ahead += other > key || (other == key && o < e);
          if (settings.policy == XSHARE) taken += s.is[o].primary && !s.is[o].prefill;
        }
#pragma unroll
      for (int step = SHARE / 2; step; step /= 2) {
        ahead += __shfl_xor_sync(ALL, ahead, step);
        taken += __shfl_xor_sync(ALL, taken, step);
      }
      in |= own && ahead < settings.budget - taken;
    }
    if (in && item % SHARE == 0) atomicOr(&s.allowed[e / 32], 1u << e % 32);
  }
}

// By a warp, a decode row within the set: as `rivals._reselect`. Lanes hold slots, and each a column of
// every 32 experts.
__device__ void select_again(Shared& s, const Scores& scores, const Id* ids, const float* weights, Id* out_ids,
                             float* out_weights, int row, int lane) {
  const bool here = lane < SLOTS;
  const Id came = here ? ids[size_t(row) * SLOTS + lane] : Id(-1);
  float weight = here ? weights[size_t(row) * SLOTS + lane] : 0.f;
  const bool filled = came >= 0 && came < EXPERTS;
  const bool lost = filled && !(s.allowed[came / 32] >> came % 32 & 1);
  const unsigned all_lost = __ballot_sync(ALL, lost);
  Id id = came;
  if (all_lost) {
    // By which the row ranks what it may read and does not hold; 0 for the others.
    unsigned key[WORDS];
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      const int e = i * 32 + lane;
      const unsigned held = __reduce_or_sync(ALL, filled && came / 32 == i ? 1u << came % 32 : 0u);
      const bool open = e < EXPERTS && ((s.allowed[i] & ~held) >> lane & 1);
      const float choice = open ? scores.choice(row, e) : -infinity();
      key[i] = choice > -infinity() ? ordered(choice) : 0;
    }
    bool served = false;
    for (unsigned left = all_lost; left; left &= left - 1) {
      unsigned own = key[0];
#pragma unroll
      for (int i = 1; i < WORDS; ++i) own = own > key[i] ? own : key[i];
      const unsigned most = __reduce_max_sync(ALL, own);
      if (most == 0) break;
      unsigned best = EXPERTS;
#pragma unroll
      for (int i = WORDS - 1; i >= 0; --i)
        if (key[i] == most) best = unsigned(i * 32 + lane);
      const unsigned next = __reduce_min_sync(ALL, best);
#pragma unroll
      for (int i = 0; i < WORDS; ++i)
        if (best == next && next / 32 == i) key[i] = 0;
      if (lane == __ffs(int(left)) - 1) id = Id(next), served = true;
    }
    // Slots that none is left for read the row's heaviest expert, of equals the lowest.
    const bool carries = filled && (served || !lost);
    if (__any_sync(ALL, lost && !served)) {
      const unsigned most = __reduce_max_sync(ALL, filled ? ordered(weight) : 0u);
      const unsigned least =
          __reduce_min_sync(ALL, filled && ordered(weight) == most ? unsigned(came) : unsigned(EXPERTS));
      if (lost && !served) id = Id(least);
    }
    const float most = row_most(scores, row, lane);
    float gate = carries ? scores.gate(row, int(id), most) : 0.f;
    const float total = warp_sum(filled ? weight : 0.f);
    float sum = warp_sum(gate);
    if (!(sum > 0.f)) {  // all underflow: shared evenly
      gate = carries ? 1.f : 0.f;
      sum = warp_sum(gate);
    }
    if (filled) weight = gate * (total / sum);
  }
  if (here) {
    out_ids[size_t(row) * SLOTS + lane] = id;
    out_weights[size_t(row) * SLOTS + lane] = weight;
  }
  if (filled) s.after[id] = 1;
  const int moved = __popc(int(all_lost));
  if (lane == 0 && moved) atomicAdd(&s.moved, moved);
}

// All of a step under a policy with a set.
__device__ void within_set(Shared& s, const Settings& settings, const Scores& scores, const Id* ids,
                           const float* weights, const unsigned char* kinds, Id* out_ids, float* out_weights,
                           int rows) {
  for (int e = int(threadIdx.x); e < EXPERTS; e += THREADS) {
    s.users[e] = 0;
    s.mass[e] = 0;
    for (int slice = 0; slice < SLICES; ++slice) s.sum[slice][e] = 0.f;
  }
  for (int word = int(threadIdx.x); word < WORDS; word += THREADS) s.allowed[word] = 0;
  __syncthreads();
  if (settings.policy == XSHARE) sum_gates(s, scores, kinds, rows);
  if (settings.policy == LYNX)
    for (int pass = 0; pass * ROWS_AT_ONCE < rows; ++pass) count_users(s, fetch(ids, weights, kinds, rows, pass));
  __syncthreads();
  allow(s, settings);
  __syncthreads();
  const int lane = int(threadIdx.x) & 31;
  for (int row = int(threadIdx.x) / 32; row < rows; row += WARPS) {
    if (kinds[row] == DECODE) {
      select_again(s, scores, ids, weights, out_ids, out_weights, row, lane);
    } else if (lane < SLOTS) {
      out_ids[size_t(row) * SLOTS + lane] = ids[size_t(row) * SLOTS + lane];
      out_weights[size_t(row) * SLOTS + lane] = weights[size_t(row) * SLOTS + lane];
    }
  }
}

// By a warp: how many experts are read before and after.
__device__ void count(Shared& s, int lane) {
  unsigned both = 0;
  for (int e = lane; e < EXPERTS; e += 32) both += unsigned(s.is[e].before) << 16 | s.after[e];
  both = __reduce_add_sync(ALL, both);
  if (lane == 0) s.counted[0] = int(both >> 16), s.counted[1] = int(both & 0xffff);
}

extern "C" __global__ void __launch_bounds__(THREADS) reroute(
    const Id* __restrict__ ids, const float* __restrict__ weights, const unsigned char* __restrict__ kinds,
    const short* __restrict__ neighbours, const short* __restrict__ reach, const int* __restrict__ settings_given,
    Id* __restrict__ out_ids, float* __restrict__ out_weights, int* __restrict__ counters,
    const long long* __restrict__ step, long long* __restrict__ calls, const Logit* __restrict__ logits,
    const float* __restrict__ bias, int rows, int layer, int layers) {
  __shared__ Shared s;
  const int thread = int(threadIdx.x), lane = thread & 31;
  const int last = THREADS - 1 - thread;  // experts are set up by those that have the fewest slots
  const bool clerk = thread == THREADS - 32;
#if __CUDA_ARCH__ >= 900
  // What comes before need not have ended for this to start, nor this for what comes after: see `nvrtc.py`.
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  // What no kernel of a step writes.
  if (thread >= THREADS - 32 && lane < 5) reinterpret_cast<int*>(&s.settings)[lane] = settings_given[lane];
  for (int e = last; e < EXPERTS; e += THREADS) {
    const short far = reach[e];
    s.is[e] = Flags{0, 0, 0, far == 0};
    s.reach[e] = far;
    s.after[e] = 0;
    s.target[e] = short(e);
  }
  Neighbours nearest[EARLY > 0 ? EARLY : 1];
#pragma unroll
  for (int turn = 0; turn < EARLY; ++turn) ask(nearest[turn], neighbours, expert_of(turn, thread), lane);
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  Slot first = fetch(ids, weights, kinds, rows, 0);
  long long at_step = 0, called = 0;
  if (clerk) at_step = *step, called = calls[layer], s.moved = 0;
  __syncthreads();
  const Settings settings = s.settings;
  const bool moves = settings.policy != OFF && settings.primary < SLOTS;
  const int primary = moves ? settings.primary : SLOTS;
  const bool strict = settings.policy >= OEA;
  const int passes = (rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
  first.rank = rank_of(first, lane, strict);
  mark(s, first, primary);
  if (first.here && !(moves && (strict || settings.policy == TOPK))) out_weights[place(0)] = first.weight;
  for (int pass = 1; pass < passes; ++pass) {
    Slot own = fetch(ids, weights, kinds, rows, pass);
    own.rank = rank_of(own, lane, strict);
    mark(s, own, primary);
  }
  __syncthreads();
  if (moves && strict) {
    within_set(s, settings, Scores{logits, bias}, ids, weights, kinds, out_ids, out_weights, rows);
    __syncthreads();
  } else {
    keep(s, settings, moves, last);
    if (moves && settings.policy == SERE) {
#pragma unroll
      for (int turn = 0; turn < EARLY; ++turn) send(s, neighbours, expert_of(turn, thread), nearest[turn], lane);
      for (int turn = EARLY; turn < TURNS; ++turn) {
        ask(nearest[0], neighbours, expert_of(turn, thread), lane);
        send(s, neighbours, expert_of(turn, thread), nearest[0], lane);
      }
    }
    if (moves && settings.policy == RANDOM) draw_targets(s, unsigned(settings.seed));
    __syncthreads();
    leave(s, first, settings, moves, out_ids, out_weights, 0);
    for (int pass = 1; pass < passes; ++pass) {
      Slot own = fetch(ids, weights, kinds, rows, pass);
      own.rank = rank_of(own, lane, strict);
      leave(s, own, settings, moves, out_ids, out_weights, pass);
    }
  }
  if (thread >= THREADS - 32) count(s, lane);
  __syncthreads();
  if (clerk) {
    int* at = counters + (size_t(at_step) * layers + layer) * 3;
    at[0] = s.counted[0];
    at[1] = s.counted[1];
    at[2] = s.moved;
    calls[layer] = called + 1;
  }
}
