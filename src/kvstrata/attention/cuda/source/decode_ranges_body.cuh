// ranges: the number of tokens and of ranges in the first row, then as in decode.cuh. PLACE: place of keys or of values
// in a row of addresses.

  using Rotation = kvstrata::Rotation<PAIRS, FIRST, INTERLEAVED>;
  const int total = ranges[0];
  kvstrata::decode_ranges<Rotation, T, DIM>(
      ranges + 8, ranges[1], starts, reinterpret_cast<const unsigned long long*>(addresses) + PLACE, own, signs, angles,
      long(blockIdx.x) * blockDim.x + threadIdx.x, long(own_shape[1]) * total * (DIM / 16), total, out);
