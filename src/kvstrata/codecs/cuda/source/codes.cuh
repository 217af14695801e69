// Packed codes, as planes.py lays them out, to numbers. Crumbs: 16 dims to a word; nibbles: 8 dims to a word.

namespace kvstrata {

constexpr int RAW = 16;  // bits of values that are not packed

// Whatever its bits, a code is the top of a byte, the rest of which is 0. It stands for the middle of the bytes that
// begin like it: in units of the vector's scale, (byte - MIDDLE + HALF) * UNIT.
constexpr int MIDDLE = 128;
constexpr float UNIT = 1.0f / 128;
template <int BITS> constexpr float HALF = float(128 >> BITS) + (BITS == 8 ? 0.5f : 0.0f);

template <int N>
__device__ __forceinline__ void load_words(const unsigned* from, unsigned (&to)[N]) {
  if constexpr (N % 4 == 0) {
    for (int i = 0; i < N / 4; ++i) load_once(from + 4 * i, to[4 * i], to[4 * i + 1], to[4 * i + 2], to[4 * i + 3]);
  } else if constexpr (N % 2 == 0) {
    for (int i = 0; i < N / 2; ++i) load_once(from + 2 * i, to[2 * i], to[2 * i + 1]);
  } else {
    for (int i = 0; i < N; ++i) load_once(from + i, to[i]);
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
  constexpr unsigned TOP = 0xC0C0C0C0, NEXT = 0x30303030, LOW = 0x0F0F0F0F;
  codes[0] = (top << 6) & TOP;
  codes[1] = (top << 4) & TOP;
  codes[2] = (top << 2) & TOP;
  codes[3] = top & TOP;
  if constexpr (BITS >= 4) {
    codes[0] |= (next << 4) & NEXT;
    codes[1] |= (next << 2) & NEXT;
    codes[2] |= next & NEXT;
    codes[3] |= (next >> 2) & NEXT;
  }
  if constexpr (BITS == 8) {
    unsigned first = permute(low0, low1, 0x6420), second = permute(low0, low1, 0x7531);
    codes[0] |= first & LOW;
    codes[1] |= (first >> 4) & LOW;
    codes[2] |= second & LOW;
    codes[3] |= (second >> 4) & LOW;
  }
}

// Two bytes of codes as float16, and OVER more: 0x6400 is 1024, where neighbours are 1 apart.
constexpr int OVER = 1024;

__device__ __forceinline__ unsigned to_halves(unsigned codes, unsigned which) {
  return permute(codes, 0x64646464, which);
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
