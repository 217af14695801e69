  // One group: a piece, a head. A vector is rotated back in the registers of the lanes that share it.
  const int lane = KV_LANE, head = KV_GROUP_Y, num_tokens = table[4], num_segments = table[5];
  const int unit = lane % kv_of_vectors::LANES, slot = lane / kv_of_vectors::LANES;
  const int used = unit < kv_of_vectors::USED ? unit : 0;
  const KV_DEVICE int* piece = table + 16 + 5 * KV_GROUP_X;
  const int start = piece[0], count = piece[1];
  const kv_long before = kv_long(head) * num_tokens;
  kv_source source;
  source.words = top + before * (KV_DIM / 16);
#if KV_BITS >= 4
  source.next = next + before * (KV_DIM / 16);
#endif
#if KV_BITS == 8
  source.low = low + before * (KV_DIM / 8);
#endif
  source.scales = scales + before;
  source.mean = means + (kv_long(head) * num_segments + piece[2]) * KV_DIM;
  for (int base = 0; base < count; base += kv_of_vectors::TOKENS) {
    const int t = base + slot < count ? base + slot : count - 1;
    kv_packed packed;
    float values[16];
    kv_fetch<KV_BITS, KV_DIM>(source, start + t, used, packed);
    kv_spread<KV_BITS>(packed, values);
    KV_UNROLL
    for (int r = 0; r < 16; ++r) values[r] = (values[r] + 0.5f) * packed.scale;
    kv_hadamard_registers<kv_of_vectors::BLOCK>(values, lane);
    if (base + slot < count && unit < kv_of_vectors::USED) {
      KV_UNROLL
      for (int r = 0; r < 16; ++r) {
        const int dim = unit * 16 + KV_DIM_OF(r);
        const float value = values[r] * kv_hadamard_scale<kv_of_vectors::BLOCK>() * kv_sign(table + 8, dim);
        const float centre = kv_centre(source.mean, table, angles, dim, piece[4] + t);
        out[(before + start + t) * KV_DIM + dim] = KV_OUT(value + centre);
      }
    }
  }
