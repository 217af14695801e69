  // Work of a group: 32 dims of one head of a row. ranges: heads, seven unused; then for each row and each partial
  // result its first split and how many.
  const int lane = KV_LANE, dim = KV_GROUP_X * 32 + lane, num_heads = ranges[0];
  const int row = KV_GROUP_Y / num_heads, head = KV_GROUP_Y % num_heads;
  const KV_DEVICE int* mine = ranges + 8 + 2 * KV_PARTIALS * row;
  const int used = dim < KV_V_DIM ? dim : KV_V_DIM - 1;
  float largest = KV_SINK(head), sum = 0.0f;
#define KV_LOOK(i, partial)                                                                  \
  for (int s = lane; s < mine[2 * i + 1]; s += 32) {                                         \
    const kv_long at = (kv_long(mine[2 * i] + s) * num_heads + head) * (KV_V_DIM + 2);       \
    largest = kv_larger(largest, partial[at + KV_V_DIM]);                                    \
  }
  KV_EACH_PARTIAL(KV_LOOK)
  largest = kv_max(largest);
  float total = KV_HAS_SINKS ? kv_exp(KV_SINK(head) - largest) : 0.0f;
#define KV_ADD(i, partial)                                                                   \
  for (int s = 0; s < mine[2 * i + 1]; ++s) {                                                \
    const kv_long at = (kv_long(mine[2 * i] + s) * num_heads + head) * (KV_V_DIM + 2);       \
    const float weight = kv_exp(partial[at + KV_V_DIM] - largest);                           \
    total += weight * partial[at + KV_V_DIM + 1];                                            \
    sum += weight * partial[at + used];                                                      \
  }
  KV_EACH_PARTIAL(KV_ADD)
  if (dim < KV_V_DIM) out[kv_long(KV_GROUP_Y) * KV_V_DIM + dim] = KV_OUT(sum / total);
