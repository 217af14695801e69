  // Work of a group: a piece, a head. Pieces of several ranges make one result, so all ranges of a layer are one
  // launch.
  const int lane = KV_LANE, head = KV_GROUP_Y, total = table[4];
  // piece: first token, how many, tokens of the arrays, slots, slot of the means, mean run, how many, offset in its
  // group, bits (0: raw) and whether the mean is RoPE-aware, first token of the result.
  const KV_DEVICE int* piece = table + 16 + 10 * KV_GROUP_X;
  const int start = piece[0], count = piece[1], bits = piece[8] & 255, slots = piece[3];
  const kv_long before = kv_long(head) * piece[2];
  kv_centring centring;
  centring.table = table;
  centring.angles = angles;
  centring.offset = piece[7];
  centring.is_rotated = (piece[8] >> 8) != 0;
  kv_source source;
  if (bits != 0) {
    source.words = KV_WORDS(slots & 255) + before * (KV_DIM / 16);
    source.next = KV_WORDS((slots >> 8) & 255) + before * (KV_DIM / 16);
    source.low = KV_WORDS((slots >> 16) & 255) + before * (KV_DIM / 8);
    source.scales = KV_HALVES((slots >> 24) & 255) + before;
    source.mean = KV_HALVES(piece[4]) + (kv_long(head) * piece[6] + piece[5]) * KV_DIM;
  } else {
    source.words = KV_RAW(slots & 255) + before * (KV_RAW_KIND == 32 ? KV_DIM : KV_DIM / 2);
  }
#define KV_TRY_DECODE(which) \
  kv_decode<which>(source, centring, start, count, out + (kv_long(head) * total + piece[9]) * KV_DIM, lane)
  if (bits == 8) KV_TRY_DECODE(8);
  else if (bits == 4) KV_TRY_DECODE(4);
  else if (bits == 2) KV_TRY_DECODE(2);
  else KV_TRY_DECODE(KV_RAW_KIND);
