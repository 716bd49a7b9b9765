  // Group (tile, row and head, role) codes 64 tokens. Role A is the first part of the call, role B the second, if any.
  threadgroup float vectors[TQ_SIMDGROUPS * TQ_WIDEST];
  threadgroup float thresholds[TQ_SIMDGROUPS * 64];
  threadgroup float magnitudes[32];
  threadgroup float units[64];
  threadgroup float aligns[64];
  threadgroup int exponents[64];
  threadgroup int finite[64];
  threadgroup int16_t tile_base[TQ_WIDEST];
  threadgroup int8_t tile_factors[TQ_WIDEST];
  threadgroup ulong parts[TQ_SIMDGROUPS];
  tq_scratch scratch;
  scratch.vectors = vectors;
  scratch.thresholds = thresholds;
  scratch.magnitudes = magnitudes;
  scratch.units = units;
  scratch.aligns = aligns;
  scratch.exponents = exponents;
  scratch.finite = finite;
  scratch.base = tile_base;
  scratch.factors = tile_factors;
  scratch.parts = parts;
  const int tile = int(threadgroup_position_in_grid.x);
  const int row = int(threadgroup_position_in_grid.y);
  const int simdgroup = int(simdgroup_index_in_threadgroup);
  const int lane = int(thread_index_in_simdgroup);
  // sizes: tokens to code; then for each role the tokens between two rows of x and the first one to code.
  const int tokens = sizes[0];
  tq_coded out;
  if (threadgroup_position_in_grid.z == 0u) {
    out.words = a_words;
    out.scales = a_scales;
    out.base = TQ_A_BASE_TO;
    out.base_exponent = TQ_A_BASE_EXPONENT_TO;
    out.factors = TQ_A_FACTORS_TO;
    out.sign_words = TQ_A_SIGN_WORDS_TO;
    out.sign_scales = TQ_A_SIGN_SCALES_TO;
    tq_encode<TQ_A_TYPE, TQ_A, TQ_A_M, TQ_A_K, TQ_A_BITS, TQ_A_PROD, TQ_A_BASE, TQ_A_FACTORS>(
        a_x + (ulong(row) * ulong(sizes[1]) + ulong(sizes[2])) * ulong(TQ_A), tokens, row, tile, a_tables,
        TQ_A_FACTORS_FROM, out, scratch, simdgroup, lane);
  }
#if TQ_ROLES == 2
  else {
    out.words = b_words;
    out.scales = b_scales;
    out.base = TQ_B_BASE_TO;
    out.base_exponent = TQ_B_BASE_EXPONENT_TO;
    out.factors = TQ_B_FACTORS_TO;
    out.sign_words = TQ_B_SIGN_WORDS_TO;
    out.sign_scales = TQ_B_SIGN_SCALES_TO;
    tq_encode<TQ_B_TYPE, TQ_B, TQ_B_M, TQ_B_K, TQ_B_BITS, TQ_B_PROD, TQ_B_BASE, TQ_B_FACTORS>(
        b_x + (ulong(row) * ulong(sizes[3]) + ulong(sizes[4])) * ulong(TQ_B), tokens, row, tile, b_tables,
        TQ_B_FACTORS_FROM, out, scratch, simdgroup, lane);
  }
#endif
