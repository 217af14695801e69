// Attention of the queries of one KV head over pieces of a row: KV_TILE queries at a time, at most KV_PIECE tokens.
//
// Scores go to shared memory, become weights there, and values are added up by them. Constants that the caller defines:
// KV_K_DIM, KV_V_DIM, KV_GROUP (queries of a KV head), KV_TILE.

#define KV_PIECE 256
#define KV_LOWEST (-1.0e30f)

typedef kv_share<KV_K_DIM> kv_of_keys;
typedef kv_share<KV_V_DIM> kv_of_values;

// Share of the keys' RoPE-aware mean in scores. See rope.py for A and B.
struct kv_mean_rotation {
  bool is_on;
  const KV_DEVICE float* angles;  // [256][units][16]: 8 cosines and 8 sines for each lane's pairs
  int offset;  // of the piece's first token in its group
  float a[KV_TILE][8];
  float b[KV_TILE][8];
};

struct kv_found {
  float largest[KV_TILE];
  float total[KV_TILE];
  float sums[KV_TILE][16];  // of a lane's dims and tokens
  float weights[KV_TILE];  // of planes: half a step for each dim
};

// Queries of a head, times the scale, to where the lanes need them; rotated for keys that are planes.
template <typename T>
KV_FN void kv_take_queries(
    const KV_DEVICE T* q, int num_queries, float scale, bool is_rotated, const KV_DEVICE int* signs,
    KV_SHARED float* room, KV_LOCAL float (&asked)[KV_TILE][16], KV_LOCAL float (&halves)[KV_TILE], int lane) {
  for (int i = lane; i < KV_TILE * KV_K_DIM; i += 32) {
    const int query = i / KV_K_DIM, dim = i % KV_K_DIM;
    const float x = float(q[(query < num_queries ? query : num_queries - 1) * KV_K_DIM + dim]) * scale;
    room[i] = is_rotated ? x * kv_sign(signs, dim) : x;
  }
  kv_barrier();
  if (is_rotated) kv_hadamard<kv_of_keys::BLOCK>(room, KV_TILE * KV_K_DIM, lane);
  const float factor = is_rotated ? kv_hadamard_scale<kv_of_keys::BLOCK>() : 1.0f;
  const int unit = lane % kv_of_keys::LANES;
  KV_UNROLL
  for (int query = 0; query < KV_TILE; ++query) {
    halves[query] = 0.0f;
    KV_UNROLL
    for (int r = 0; r < 16; ++r) {
      const int at = query * KV_K_DIM + unit * 16 + KV_DIM_OF(r);
      asked[query][r] = unit < kv_of_keys::USED ? room[at] * factor : 0.0f;
      halves[query] += 0.5f * asked[query][r];
    }
  }
  kv_barrier();
}

// Share of the mean of a piece in all scores of a query; A and B of the pairs that RoPE rotates. `numbers`: the
// rotation in the table.
template <typename T>
KV_FN void kv_take_mean(
    const KV_DEVICE T* q, int num_queries, float scale, const KV_DEVICE kv_half* mean, const KV_DEVICE int* numbers,
    KV_LOCAL kv_mean_rotation& rotation, KV_LOCAL float (&shares)[KV_TILE], int lane) {
  const int first = numbers[0], step = numbers[1], gap = numbers[2], num_pairs = rotation.is_on ? numbers[3] : 0;
  const int unit = lane % kv_of_keys::LANES;
  KV_UNROLL
  for (int query = 0; query < KV_TILE; ++query) {
    const KV_DEVICE T* mine = q + (query < num_queries ? query : num_queries - 1) * KV_K_DIM;
    float share = 0.0f;
    for (int dim = lane; dim < KV_K_DIM; dim += 32) {
      const bool is_rotated = dim >= first && dim < first + 2 * num_pairs;
      share += is_rotated ? 0.0f : float(mine[dim]) * float(mean[dim]);
    }
    shares[query] = kv_sum(share) * scale;
    if (!rotation.is_on) continue;
    KV_UNROLL
    for (int i = 0; i < 8; ++i) {
      const int pair = unit * 8 + i, dim = first + step * (pair < num_pairs ? pair : 0);
      const float q1 = float(mine[dim]) * scale, q2 = float(mine[dim + gap]) * scale;
      const float m1 = float(mean[dim]), m2 = float(mean[dim + gap]);
      rotation.a[query][i] = pair < num_pairs ? q1 * m1 + q2 * m2 : 0.0f;
      rotation.b[query][i] = pair < num_pairs ? q2 * m1 - q1 * m2 : 0.0f;
    }
  }
}

// Cosines and sines of a lane's pairs at an offset: as the table has them, or some tokens further.
struct kv_angles {
  float cos[8];
  float sin[8];
};

KV_FN void kv_take_angles(const KV_DEVICE float* table, int offset, int unit, KV_LOCAL kv_angles& angles) {
  const int mine = unit < kv_of_keys::USED ? unit : 0;
  const KV_DEVICE float* at = table + (offset * kv_of_keys::USED + mine) * 16;
  KV_UNROLL
  for (int i = 0; i < 8; ++i) {
    angles.cos[i] = at[i];
    angles.sin[i] = at[8 + i];
  }
}

KV_FN void kv_advance_angles(KV_LOCAL kv_angles& angles, const KV_LOCAL kv_angles& by) {
  KV_UNROLL
  for (int i = 0; i < 8; ++i) {
    const float cosine = angles.cos[i] * by.cos[i] - angles.sin[i] * by.sin[i];
    angles.sin[i] = angles.sin[i] * by.cos[i] + angles.cos[i] * by.sin[i];
    angles.cos[i] = cosine;
  }
}

template <int KIND, bool ROTATES>
KV_FN void kv_score(
    const KV_LOCAL kv_source& keys, int start, int count, const KV_LOCAL float (&asked)[KV_TILE][16],
    const KV_LOCAL float (&halves)[KV_TILE], const KV_LOCAL kv_mean_rotation& rotation, KV_SHARED float* scores,
    int lane) {
  enum { AHEAD = kv_form<KIND>::AHEAD, TOKENS = kv_of_keys::TOKENS };
  const int unit = lane % kv_of_keys::LANES, slot = lane / kv_of_keys::LANES;
  const int used = unit < kv_of_keys::USED ? unit : 0;
  kv_angles angles, by;
  if (ROTATES) kv_take_angles(rotation.angles, TOKENS, unit, by);
  for (int base = 0; base < count; base += AHEAD * TOKENS) {
    kv_packed packed[AHEAD];
    KV_UNROLL
    for (int i = 0; i < AHEAD; ++i) {
      const int token = base + i * TOKENS + slot;
      kv_fetch<KIND, KV_K_DIM>(keys, start + (token < count ? token : count - 1), used, packed[i]);
    }
    if (ROTATES) {
      const int token = base + slot;
      kv_take_angles(rotation.angles, rotation.offset + (token < count ? token : count - 1), unit, angles);
    }
    KV_UNROLL
    for (int i = 0; i < AHEAD; ++i) {
      const int token = base + i * TOKENS + slot;
      float values[16];
      kv_spread<KIND>(packed[i], values);
      KV_UNROLL
      for (int query = 0; query < KV_TILE; ++query) {
        float sum = KV_IS_CODED(KIND) ? halves[query] : 0.0f;
        KV_UNROLL
        for (int r = 0; r < 16; ++r) sum += asked[query][r] * values[r];
        if (KV_IS_CODED(KIND)) sum *= packed[i].scale;
        if (ROTATES) {
          KV_UNROLL
          for (int p = 0; p < 8; ++p) {
            sum += rotation.a[query][p] * angles.cos[p] + rotation.b[query][p] * angles.sin[p];
          }
        }
        sum = kv_sum_over(sum, 1, kv_of_keys::LANES);
        if (unit == 0 && token < count) scores[query * KV_PIECE + token] = sum;
      }
      if (ROTATES && i + 1 < AHEAD) kv_advance_angles(angles, by);
    }
  }
}

// Scores become weights; what was found before shrinks to the new largest score. Tells the sum of the weights.
KV_FN void kv_weigh(
    KV_SHARED float* scores, int count, const KV_LOCAL float (&shares)[KV_TILE], KV_LOCAL kv_found& found,
    KV_LOCAL float (&shrunk)[KV_TILE], KV_LOCAL float (&sums)[KV_TILE], int lane) {
  KV_UNROLL
  for (int query = 0; query < KV_TILE; ++query) {
    KV_SHARED float* mine = scores + query * KV_PIECE;
    float largest = KV_LOWEST;
    for (int t = lane; t < count; t += 32) largest = kv_larger(largest, mine[t]);
    largest = kv_larger(found.largest[query], kv_max(largest) + shares[query]);
    shrunk[query] = kv_exp(found.largest[query] - largest);
    found.largest[query] = largest;
    float sum = 0.0f;
    for (int t = lane; t < count; t += 32) {
      const float weight = kv_exp(mine[t] + (shares[query] - largest));
      mine[t] = weight;
      sum += weight;
    }
    sums[query] = kv_sum(sum);
    found.total[query] = found.total[query] * shrunk[query] + sums[query];
    found.weights[query] *= shrunk[query];
    KV_UNROLL
    for (int r = 0; r < 16; ++r) found.sums[query][r] *= shrunk[query];
  }
}

template <int KIND>
KV_FN void kv_mix(
    const KV_LOCAL kv_source& source, int start, int count, const KV_SHARED float* weights, KV_LOCAL kv_found& found,
    int lane) {
  enum { AHEAD = kv_form<KIND>::AHEAD, TOKENS = kv_of_values::TOKENS };
  const int unit = lane % kv_of_values::LANES, slot = lane / kv_of_values::LANES;
  const int used = unit < kv_of_values::USED ? unit : 0;
  for (int base = 0; base < count; base += AHEAD * TOKENS) {
    kv_packed packed[AHEAD];
    KV_UNROLL
    for (int i = 0; i < AHEAD; ++i) {
      const int token = base + i * TOKENS + slot;
      kv_fetch<KIND, KV_V_DIM>(source, start + (token < count ? token : count - 1), used, packed[i]);
    }
    KV_UNROLL
    for (int i = 0; i < AHEAD; ++i) {
      const int token = base + i * TOKENS + slot;
      float values[16];
      kv_spread<KIND>(packed[i], values);
      KV_UNROLL
      for (int query = 0; query < KV_TILE; ++query) {
        float weight = token < count ? weights[query * KV_PIECE + token] : 0.0f;
        if (KV_IS_CODED(KIND)) {
          weight *= packed[i].scale;
          found.weights[query] += weight;
        }
        KV_UNROLL
        for (int r = 0; r < 16; ++r) found.sums[query][r] += weight * values[r];
      }
    }
  }
}

// The sums of all lanes, rotated back, in shared memory: [KV_TILE][KV_V_DIM], to be multiplied by what is returned.
KV_FN float kv_gather(const KV_LOCAL kv_found& found, bool is_rotated, KV_SHARED float* room, int lane) {
  const int unit = lane % kv_of_values::LANES;
  KV_UNROLL
  for (int query = 0; query < KV_TILE; ++query) {
    KV_UNROLL
    for (int r = 0; r < 16; ++r) {
      const float mine = found.sums[query][r] + 0.5f * found.weights[query];
      const float sum = kv_sum_over(mine, kv_of_values::LANES, 32);
      if (lane < kv_of_values::USED) room[query * KV_V_DIM + unit * 16 + KV_DIM_OF(r)] = sum;
    }
  }
  kv_barrier();
  if (!is_rotated) return 1.0f;
  kv_hadamard<kv_of_values::BLOCK>(room, KV_TILE * KV_V_DIM, lane);
  return kv_hadamard_scale<kv_of_values::BLOCK>();
}
