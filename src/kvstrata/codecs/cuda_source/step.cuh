// One decode step of a batch: each row writes its new token into its buffer and attends to all that it reads.
//
// Nothing that is read comes as an argument but tables: `addresses` says where the arrays of each part lie, `kinds` what
// they are, `pieces` which tokens of which part a warp takes, `places` where the new tokens go. So one kernel serves
// any number of rows and parts, of any bits. A block has the pieces of one row, whatever their parts are.
//
// places [rows][8]: the part with the row's own buffer, the new token's place in it, its tokens with the new one, how
// many of them to a piece, the first of the row's pieces, how many they are.
// pieces [n][8]: part, first token, how many, segment of keys, segment of values, where in its group the first is.
// kinds [parts][8]: bits of keys and of values (16: raw), tokens of the arrays, segments of keys, of values, and the
// turn of the keys' means: pairs, first dim, whether a pair's dims are neighbours.
// addresses [parts][12]: of keys, then of values: values (or top crumbs), next, low, scales, means; then the columns
// that belong to the turn.

namespace kvstrata {

constexpr int ENTRY = 8, ADDRESSES = 12;

// Of one piece.
struct Work {
  Source k, v;
  int k_bits, v_bits, start, count, offset;
  AnyTurn turn;
  const __half* columns;
};

template <typename T>
__device__ __forceinline__ const T* address(unsigned long long number) {
  return reinterpret_cast<const T*>(number);
}

template <int DIM>
__device__ __forceinline__ Source source_of(
    const unsigned long long* at, int bits, int head, long num_tokens, int num_segments, int segment) {
  const long row = head * num_tokens;
  if (bits == RAW) return {address<unsigned short>(at[0]) + row * DIM, nullptr, nullptr, nullptr, nullptr, DIM};
  return {address<unsigned>(at[0]) + row * (DIM / 16), address<unsigned>(at[1]) + row * (DIM / 16),
          address<unsigned>(at[2]) + row * (DIM / 8),  address<__half>(at[3]) + row,
          address<__half>(at[4]) + (long(head) * num_segments + segment) * DIM, 0};
}

// `own`: which piece of the row's own buffer it is; below 0: it stands in `known`.
template <int K_DIM, int V_DIM>
__device__ __forceinline__ Work work_of(
    const int* place, const int* known, int own, const int* kinds, const unsigned long long* addresses, int head) {
  const int part = own < 0 ? known[0] : place[0];
  const int* kind = kinds + ENTRY * part;
  const unsigned long long* at = addresses + ADDRESSES * part;
  Work work;
  work.start = own < 0 ? known[1] : own * place[3];
  work.count = own < 0 ? known[2] : min(place[3], place[2] - work.start);
  work.offset = own < 0 ? known[5] : 0;
  work.k_bits = kind[0], work.v_bits = kind[1];
  work.k = source_of<K_DIM>(at, kind[0], head, kind[2], kind[3], own < 0 ? known[3] : 0);
  work.v = source_of<V_DIM>(at + 5, kind[1], head, kind[2], kind[4], own < 0 ? known[4] : 0);
  work.turn = {kind[5], kind[6], kind[7] != 0};
  work.columns = address<__half>(at[10]);
  return work;
}

// By the warp whose piece has the new token's place. MLX does not know, and must not, or it would copy.
template <int DIM, typename T>
__device__ __forceinline__ void put_token(const Source& to, int place, const T* from, const Lane& at) {
  auto* values = static_cast<unsigned short*>(const_cast<void*>(to.values)) + long(place) * DIM;
  const auto* bits = reinterpret_cast<const unsigned short*>(from);
  for (int d = at.lane; d < DIM; d += 32) values[d] = bits[d];
}

template <int K_DIM, int V_DIM, int TILES>
struct Shared {
  Queries<K_DIM, TILES> queries, rotated;
  Exchange<TILES> exchange;
  Found<V_DIM, TILES> found;
  bool is_last;
};

// Compiled once, whatever the bits are.
template <int DIM, int TILES>
__device__ __noinline__ void share_turned(
    const Queries<DIM, TILES>& queries, const Work& work, int num_queries, float* memory, const Lane& at) {
  add_turned(work.turn, queries, work.k.mean, work.columns, work.offset, work.count, num_queries, memory, at);
}

template <int K_BITS, int V_BITS, int K_DIM, int V_DIM, int TILES>
__device__ __noinline__ void attend_planes(
    Shared<K_DIM, V_DIM, TILES>& shared, const Work& work, const float* v_signs, int num_queries, const Lane& at) {
  float* found = shared.found.sums[at.warp][0];
  // Until the piece is done, what it finds has no need of its memory.
  float* shares = work.turn.pairs > 0 ? found : nullptr;
  if (shares != nullptr) share_turned(shared.queries, work, num_queries, shares, at);
  Keys<K_BITS, K_DIM> k;
  Values<V_BITS, V_DIM> v;
  k.load(work.k, work.start, work.start + work.count - 1, at);
  v.load(work.v, work.start, work.start + work.count - 1, at);
  Asked<false, K_BITS, K_DIM, TILES> asked;
  asked.take(shared.rotated, num_queries, at);
  if (shares == nullptr) asked.centre(shared.queries, work.k.mean, num_queries, at);
  attend<false, K_BITS, V_BITS, K_DIM, V_DIM, TILES>(
      shared.exchange, asked, k, v, work.k, work.v, shares, v_signs, work.start, work.count, num_queries, found,
      shared.found.stats[at.warp][0], at);
}

template <int K_BITS, int K_DIM, int V_DIM, int TILES>
__device__ __forceinline__ void attend_coded(
    Shared<K_DIM, V_DIM, TILES>& shared, const Work& work, const float* v_signs, int num_queries, const Lane& at) {
  if (work.v_bits == 8) {
    attend_planes<K_BITS, 8, K_DIM, V_DIM, TILES>(shared, work, v_signs, num_queries, at);
  } else if (work.v_bits == 4) {
    attend_planes<K_BITS, 4, K_DIM, V_DIM, TILES>(shared, work, v_signs, num_queries, at);
  } else {
    attend_planes<K_BITS, 2, K_DIM, V_DIM, TILES>(shared, work, v_signs, num_queries, at);
  }
}

template <bool BF, int K_DIM, int V_DIM, int TILES>
__device__ __noinline__ void attend_raw(
    Shared<K_DIM, V_DIM, TILES>& shared, const Work& work, int num_queries, const Lane& at) {
  Keys<RAW, K_DIM> k;
  Values<RAW, V_DIM> v;
  k.load(work.k, work.start, work.start + work.count - 1, at);
  v.load(work.v, work.start, work.start + work.count - 1, at);
  Asked<BF, RAW, K_DIM, TILES> asked;
  asked.take(shared.queries, num_queries, at);
  attend<BF, RAW, RAW, K_DIM, V_DIM, TILES>(
      shared.exchange, asked, k, v, work.k, work.v, nullptr, nullptr, work.start, work.count, num_queries,
      shared.found.sums[at.warp][0], shared.found.stats[at.warp][0], at);
}

// The block that is last to come combines what all of them found: sums and stats [blocks, queries, ...] of a row's head.
template <int V_DIM, typename T>
__device__ __forceinline__ void combine_found(
    const float* sums, const float* stats, int num_blocks, int num_queries, const float* sinks, T* out) {
  for (int i = threadIdx.x; i < num_queries * V_DIM; i += 32 * WARPS) {
    const int query = i / V_DIM;
    const float sink = sinks == nullptr ? -INFINITY : sinks[query];
    float largest = sink, sum = 0;
#pragma unroll 8
    for (int b = 0; b < num_blocks; ++b) largest = fmaxf(largest, __ldcg(stats + 2 * (b * num_queries + query)));
    float total = expf(sink - largest);
#pragma unroll 8
    for (int b = 0; b < num_blocks; ++b) {
      const long at = long(b) * num_queries + query;
      const float weight = expf(__ldcg(stats + 2 * at) - largest);
      total += weight * __ldcg(stats + 2 * at + 1), sum += weight * __ldcg(sums + at * V_DIM + i % V_DIM);
    }
    out[i] = static_cast<T>(sum / total);
  }
}

}  // namespace kvstrata
