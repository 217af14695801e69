  // Work of a group: a split (some pieces of one row, all of one kind), a KV head, a tile of its queries.
  // table: scale, rotation (first, step, gap, pairs), KV heads, two unused, signs [8], then splits and pieces.
  const int lane = KV_LANE, head = KV_GROUP_Y, first_query = KV_GROUP_Z * KV_TILE;
  const KV_DEVICE int* split = table + 16 + 4 * KV_GROUP_X;
  const KV_DEVICE int* piece = table + split[1];
  const int row = split[0], num_pieces = split[2], k_kind = split[3] & 255, v_kind = (split[3] >> 8) & 255;
  const int num_heads = table[5], num_queries = KV_GROUP - first_query < KV_TILE ? KV_GROUP - first_query : KV_TILE;
  const float scale = kv_as_float((kv_uint)table[0]);
  const bool k_coded = KV_IS_CODED(k_kind), v_coded = KV_IS_CODED(v_kind);
  const kv_long first = (kv_long(row) * num_heads + head) * KV_GROUP + first_query;
  KV_SHARED_ARRAY(float, scores, KV_TILE * KV_PIECE);
  KV_SHARED_ARRAY(float, centres, KV_TILE * KV_V_DIM);
  float asked[KV_TILE][16], halves[KV_TILE], shares[KV_TILE], shrunk[KV_TILE], sums[KV_TILE];
  kv_mean_rotation rotation;
  rotation.is_on = (split[3] >> 16) != 0;
  rotation.angles = angles;
  kv_found found;
  KV_UNROLL
  for (int query = 0; query < KV_TILE; ++query) {
    found.largest[query] = KV_LOWEST;
    found.total[query] = found.weights[query] = shares[query] = 0.0f;
    KV_UNROLL
    for (int r = 0; r < 16; ++r) found.sums[query][r] = 0.0f;
  }
  kv_take_queries(q + first * KV_K_DIM, num_queries, scale, k_coded, table + 8, scores, asked, halves, lane);
  if (v_coded) {
    for (int i = lane; i < KV_TILE * KV_V_DIM; i += 32) centres[i] = 0.0f;
    kv_barrier();
  }
  for (int number = 0; number < num_pieces; ++number, piece += 12) {
    // piece: first token, how many, tokens of the arrays, slots (keys, values, means), mean runs, how many, offset.
    const int start = piece[0], count = piece[1];
    const kv_long before = kv_long(head) * piece[2];
    kv_source keys, values;
    if (k_coded) {
      keys.words = KV_WORDS(piece[3] & 255) + before * (KV_K_DIM / 16);
      keys.next = KV_WORDS((piece[3] >> 8) & 255) + before * (KV_K_DIM / 16);
      keys.low = KV_WORDS((piece[3] >> 16) & 255) + before * (KV_K_DIM / 8);
      keys.scales = KV_HALVES((piece[3] >> 24) & 255) + before;
      keys.mean = KV_HALVES(piece[5] & 255) + (kv_long(head) * piece[8] + piece[6]) * KV_K_DIM;
      rotation.offset = piece[10];
      kv_take_mean(q + first * KV_K_DIM, num_queries, scale, keys.mean, table + 1, rotation, shares, lane);
    } else {
      keys.words = KV_RAW(piece[3] & 255) + before * (k_kind == 32 ? KV_K_DIM : KV_K_DIM / 2);
    }
    if (v_coded) {
      values.words = KV_WORDS(piece[4] & 255) + before * (KV_V_DIM / 16);
      values.next = KV_WORDS((piece[4] >> 8) & 255) + before * (KV_V_DIM / 16);
      values.low = KV_WORDS((piece[4] >> 16) & 255) + before * (KV_V_DIM / 8);
      values.scales = KV_HALVES((piece[4] >> 24) & 255) + before;
      values.mean = KV_HALVES((piece[5] >> 8) & 255) + (kv_long(head) * piece[9] + piece[7]) * KV_V_DIM;
    } else {
      values.words = KV_RAW(piece[4] & 255) + before * (v_kind == 32 ? KV_V_DIM : KV_V_DIM / 2);
    }
#define KV_TRY_SCORE(kind, rotates) kv_score<kind, rotates>(keys, start, count, asked, halves, rotation, scores, lane)
#define KV_TRY_CODED(kind) \
  if (k_kind == kind) { if (rotation.is_on) KV_TRY_SCORE(kind, true); else KV_TRY_SCORE(kind, false); }
    if (KV_CODED) { KV_TRY_CODED(8) else KV_TRY_CODED(4) else KV_TRY_CODED(2) }
    if (KV_RAW_KINDS & 1) { if (k_kind == 32) KV_TRY_SCORE(32, false); }
    if (KV_RAW_KINDS & 2) { if (k_kind == 16) KV_TRY_SCORE(16, false); }
    if (KV_RAW_KINDS & 4) { if (k_kind == 17) KV_TRY_SCORE(17, false); }
    kv_barrier();
    kv_weigh(scores, count, shares, found, shrunk, sums, lane);
    kv_barrier();
#define KV_TRY_MIX(kind) if (v_kind == kind) kv_mix<kind>(values, start, count, scores, found, lane)
    if (KV_CODED) { KV_TRY_MIX(8); else KV_TRY_MIX(4); else KV_TRY_MIX(2); }
    if (KV_RAW_KINDS & 1) KV_TRY_MIX(32);
    if (KV_RAW_KINDS & 2) KV_TRY_MIX(16);
    if (KV_RAW_KINDS & 4) KV_TRY_MIX(17);
    if (v_coded) {
      KV_UNROLL
      for (int query = 0; query < KV_TILE; ++query) {
        for (int dim = lane; dim < KV_V_DIM; dim += 32) {
          const int at = query * KV_V_DIM + dim;
          centres[at] = centres[at] * shrunk[query] + sums[query] * float(values.mean[dim]);
        }
      }
    }
    kv_barrier();
  }
  const float factor = kv_gather(found, v_coded, scores, lane);
  const kv_long to = (kv_long(KV_GROUP_X) * num_heads + head) * KV_GROUP + first_query;
  KV_UNROLL
  for (int query = 0; query < KV_TILE; ++query) {
    if (query >= num_queries) continue;
    KV_DEVICE float* mine = partial + (to + query) * (KV_V_DIM + 2);
    for (int dim = lane; dim < KV_V_DIM; dim += 32) {
      const int at = query * KV_V_DIM + dim;
      const float sum = scores[at] * factor;
      mine[dim] = v_coded ? sum * kv_sign(table + 8, dim) + centres[at] : sum;
    }
    if (lane == 0) {
      mine[KV_V_DIM] = found.largest[query];
      mine[KV_V_DIM + 1] = found.total[query];
    }
  }
