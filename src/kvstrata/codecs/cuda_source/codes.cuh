// Packed codes, as planes.py lays them out, to numbers. Crumbs: 16 dims to a word; nibbles: 8 dims to a word.

namespace kvstrata {

constexpr int RAW = 16;  // bits of values that are not packed

// What a code is worth, in units of the vector's scale: (code - MIDDLE + 0.5) * STEP.
template <int BITS> constexpr unsigned MIDDLE = 1u << (BITS - 1);
template <int BITS> constexpr float STEP = 2.0f / float(1 << BITS);

template <int N>
__device__ __forceinline__ void load_words(const unsigned* from, unsigned (&to)[N]) {
  if constexpr (N % 4 == 0) {
    for (int i = 0; i < N / 4; ++i) {
      uint4 four = __ldg(reinterpret_cast<const uint4*>(from) + i);
      to[4 * i] = four.x, to[4 * i + 1] = four.y, to[4 * i + 2] = four.z, to[4 * i + 3] = four.w;
    }
  } else if constexpr (N % 2 == 0) {
    for (int i = 0; i < N / 2; ++i) {
      uint2 two = __ldg(reinterpret_cast<const uint2*>(from) + i);
      to[2 * i] = two.x, to[2 * i + 1] = two.y;
    }
  } else {
    for (int i = 0; i < N; ++i) to[i] = __ldg(from + i);
  }
}

// N 16-bit words, two to a register; with STEP 1 neighbours. Every row of crumbs is whole words: an even N is aligned.
template <int N, int STEP>
__device__ __forceinline__ void load_halves(const unsigned short* from, unsigned (&to)[(N + 1) / 2]) {
  if constexpr (N % 2 == 0 && STEP == 1) {
    load_words(reinterpret_cast<const unsigned*>(from), to);
  } else {
    for (int i = 0; i < (N + 1) / 2; ++i) {
      to[i] = __ldg(from + 2 * i * STEP);
      if (2 * i + 1 < N) to[i] |= unsigned(__ldg(from + (2 * i + 1) * STEP)) << 16;
    }
  }
}

// 16 dims, or 8 dims of two tokens: codes[i] has those of i, i + 4, i + 8 and i + 12, a byte each.
template <int BITS>
__device__ __forceinline__ void unpack(
    unsigned top, unsigned next, unsigned low0, unsigned low1, unsigned (&codes)[4]) {
  if constexpr (BITS == 8) {
    constexpr unsigned TOP = 0xC0C0C0C0, NEXT = 0x30303030, LOW = 0x0F0F0F0F;
    unsigned first = permute(low0, low1, 0x6420), second = permute(low0, low1, 0x7531);
    codes[0] = ((top << 6) & TOP) | ((next << 4) & NEXT) | (first & LOW);
    codes[1] = ((top << 4) & TOP) | ((next << 2) & NEXT) | ((first >> 4) & LOW);
    codes[2] = ((top << 2) & TOP) | (next & NEXT) | (second & LOW);
    codes[3] = (top & TOP) | ((next >> 2) & NEXT) | ((second >> 4) & LOW);
  } else if constexpr (BITS == 4) {
    constexpr unsigned TOP = 0x0C0C0C0C, NEXT = 0x03030303;
    codes[0] = ((top << 2) & TOP) | (next & NEXT);
    codes[1] = (top & TOP) | ((next >> 2) & NEXT);
    codes[2] = ((top >> 2) & TOP) | ((next >> 4) & NEXT);
    codes[3] = ((top >> 4) & TOP) | ((next >> 6) & NEXT);
  } else {
    for (int i = 0; i < 4; ++i) codes[i] = (top >> (2 * i)) & 0x03030303;
  }
}

// Two bytes of codes as float16, less the middle. 0x6400 is 1024, where neighbours are 1 apart.
template <int BITS>
__device__ __forceinline__ unsigned to_halves(unsigned codes, unsigned which) {
  constexpr unsigned BOTH = 0x64006400 + MIDDLE<BITS> * 0x10001;
  return subtract_halves(permute(codes, 0x64646464, which), BOTH);
}

__device__ __forceinline__ void butterfly(float& a, float& b) {
  float sum = a + b;
  b = a - b;
  a = sum;
}

// 16 dims of a vector, its other dims in the lanes beside. Without the factor 1 / sqrt(BLOCK).
template <int DIM>
__device__ __forceinline__ void rotate_sixteen(float (&x)[16]) {
#pragma unroll
  for (int half = 1; half < 16; half *= 2) {
#pragma unroll
    for (int k = 0; k < 8; ++k) butterfly(x[k / half * 2 * half + k % half], x[k / half * 2 * half + k % half + half]);
  }
  constexpr int BLOCK = DIM & -DIM;
#pragma unroll
  for (int step = 1; step < BLOCK / 16; step *= 2) {
    bool upper = threadIdx.x & step;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float other = __shfl_xor_sync(0xFFFFFFFF, x[i], step);
      x[i] = upper ? other - x[i] : x[i] + other;
    }
  }
}

}  // namespace kvstrata
