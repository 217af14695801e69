// Encoding of vectors to codes. A block has a mean run of one head: first its mean, then its vectors, 16 dims to a
// thread.

namespace kvstrata {

constexpr int ENCODE_THREADS = 256;
constexpr float LARGEST = 65504.0f;  // of float16

// Lanes that share a vector: a power of two, so that some may have nothing to do.
constexpr __device__ int lanes_for(int units) {
  int lanes = 1;
  while (lanes < units) lanes *= 2;
  return lanes;
}

// Mean of tokens [start, end). Values that float16 cannot hold must not move it.
template <typename ROTATION, int DIM, typename T>
__device__ __forceinline__ void mean_of(
    const T* x, const float* angles, int offset, int start, int end, float (&sums)[ENCODE_THREADS],
    float (&mean)[DIM], __half* out) {
  constexpr int GROUPS = ENCODE_THREADS / DIM > 0 ? ENCODE_THREADS / DIM : 1;
  for (int base = 0; base < DIM; base += ENCODE_THREADS) {
    int group = threadIdx.x / DIM, d = base + threadIdx.x % DIM;
    float sum = 0;
    if (group < GROUPS && d < DIM) {
      for (int token = start + group; token < end; token += GROUPS) {
        auto usual = [&](int i) {
          float value = static_cast<float>(x[long(token) * DIM + i]);
          return fabsf(value) <= LARGEST ? value : 0.0f;
        };
        sum += ROTATION::rotated_back(usual, d, angles, (offset + token) % GROUP);
      }
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (group == 0 && d < DIM) {
      for (int g = 1; g < GROUPS; ++g) sum += sums[g * DIM + d];
      __half rounded = __float2half_rn(sum / (end - start));
      out[d] = rounded, mean[d] = __half2float(rounded);
    }
    __syncthreads();
  }
}

// The nearest code of y / scale on [-1, 1].
__device__ __forceinline__ unsigned code_of(float y, float scale) {
  return unsigned(fminf(fmaxf(floorf((y / scale + 1) * 128), 0.0f), 255.0f));
}

// x [tokens, DIM] of one head; the planes of the same head.
template <typename ROTATION, int BITS, int DIM, typename T>
__device__ __forceinline__ void encode(
    const T* x, const float (&mean)[DIM], const float* signs, const float* angles, int offset, int start, int end,
    unsigned* top, unsigned* next, unsigned* low, __half* scales) {
  constexpr int UNITS = DIM / 16, LANES = lanes_for(UNITS), VECTORS = ENCODE_THREADS / LANES;
  int unit = threadIdx.x % LANES, dim = min(unit, UNITS - 1) * 16;
  for (int first = start; first < end; first += VECTORS) {
    int token = first + threadIdx.x / LANES;
    bool is_ours = unit < UNITS && token < end;
    int within = (offset + min(token, end - 1)) % GROUP;
    const T* vector = x + long(min(token, end - 1)) * DIM + dim;
    auto mean_at = [&](int d) { return mean[d]; };
    float y[16], largest = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float value = static_cast<float>(vector[i]);
      value = isnan(value) ? 0 : fminf(fmaxf(value, -LARGEST), LARGEST);
      y[i] = (value - ROTATION::rotated(mean_at, dim + i, angles, within)) * signs[dim + i];
    }
    rotate_sixteen<DIM>(y);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      y[i] *= rsqrtf(float(DIM & -DIM));
      largest = fmaxf(largest, is_ours ? fabsf(y[i]) : 0);
    }
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, step));
    }
    // Codes belong to the scale as it is stored, so its rounding costs nothing.
    __half stored = __float2half_rn(fminf(largest, LARGEST));
    float scale = __half2float(stored) > 0 ? __half2float(stored) : 1;
    unsigned words[4] = {};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      unsigned code = code_of(y[i], scale);
      words[0] |= (code >> 6) << (2 * i);
      words[1] |= (code >> 4 & 3) << (2 * i);
      words[2 + i / 8] |= (code & 15) << (4 * (i % 8));
    }
    if (is_ours) {
      long at = long(token) * UNITS + unit;
      top[at] = words[0];
      if constexpr (BITS >= 4) next[at] = words[1];
      if constexpr (BITS == 8) low[2 * at] = words[2], low[2 * at + 1] = words[3];
      if (unit == 0) scales[token] = stored;
    }
  }
}

}  // namespace kvstrata
