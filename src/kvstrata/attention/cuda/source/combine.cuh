// Combines partial results of attention, by launches and pieces: weighted by exp(largest score - largest of all).

namespace kvstrata {

// sums [heads, pieces, queries, V_DIM], stats [heads, pieces, queries, 2]
struct Partial {
  const float* sums;
  const float* stats;
  int num_pieces;
};

template <int V_DIM>
struct Combining {
  static constexpr int GROUPS = 1024 / V_DIM;  // of threads, a thread for each dim; pieces alternate between groups
  static constexpr int THREADS = GROUPS * V_DIM;
  float sums[GROUPS][V_DIM];
  float totals[GROUPS];
  float largest[THREADS / 32];
};

template <typename T, int V_DIM, int PARTIALS>
__device__ __forceinline__ void combine(
    Combining<V_DIM>& shared, const Partial (&partials)[PARTIALS], int head, int query, int num_queries, float sink,
    T* out, float* log_sum) {
  using C = Combining<V_DIM>;
  int group = threadIdx.x / V_DIM, dim = threadIdx.x % V_DIM;
  float largest = sink;
#pragma unroll
  for (int i = 0; i < PARTIALS; ++i) {
    for (int piece = threadIdx.x; piece < partials[i].num_pieces; piece += C::THREADS) {
      long row = (long(head) * partials[i].num_pieces + piece) * num_queries + query;
      largest = fmaxf(largest, partials[i].stats[2 * row]);
    }
  }
  for (int step = 16; step; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, step));
  if (threadIdx.x % 32 == 0) shared.largest[threadIdx.x / 32] = largest;
  __syncthreads();
  for (int w = 0; w < C::THREADS / 32; ++w) largest = fmaxf(largest, shared.largest[w]);
  float sum = 0, total = 0;
#pragma unroll
  for (int i = 0; i < PARTIALS; ++i) {
#pragma unroll 8
    for (int piece = group; piece < partials[i].num_pieces; piece += C::GROUPS) {
      long row = (long(head) * partials[i].num_pieces + piece) * num_queries + query;
      float weight = expf(partials[i].stats[2 * row] - largest);
      total += weight * partials[i].stats[2 * row + 1];
      sum += weight * partials[i].sums[row * V_DIM + dim];
    }
  }
  shared.sums[group][dim] = sum;
  if (dim == 0) shared.totals[group] = total;
  __syncthreads();
  if (group == 0) {
    total = expf(sink - largest);
    sum = 0;
    for (int g = 0; g < C::GROUPS; ++g) sum += shared.sums[g][dim], total += shared.totals[g];
    long row = long(head) * num_queries + query;
    out[row * V_DIM + dim] = static_cast<T>(sum / total);
    if (dim == 0) log_sum[row] = largest + logf(total);
  }
}

}  // namespace kvstrata
