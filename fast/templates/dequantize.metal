  // Section 6: each simdgroup restores one vector.
  threadgroup float vectors[TQ_SIMDGROUPS * TQ_BUFFERS * TQ_D];
  threadgroup float magnitudes[32];
  const int simdgroup = int(simdgroup_index_in_threadgroup);
  const int lane = int(thread_index_in_simdgroup);
  const int thread_index = 32 * simdgroup + lane;
  if (TQ_BITS != 8 && thread_index < (1 << ((TQ_BITS - 1) & 7))) {
    const uint bytes = tables[TQ_MAGNITUDES + (thread_index >> 2)];
    magnitudes[thread_index] = float((bytes >> (8 * (thread_index & 3))) & 255u);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  // sizes: vectors in all, and vectors that share one set of factors.
  const int vector = int(threadgroup_position_in_grid.x) * TQ_SIMDGROUPS + simdgroup;
  if (vector < sizes[0]) {
    const int depth = 32 - int(clz(uint(TQ_D - 1)));
    const int kappa = depth + 3;
    threadgroup float* v = vectors + TQ_BUFFERS * TQ_D * simdgroup;
    device const uint* mine = words + ulong(vector) * ulong(tq_width(TQ_BITS, TQ_D));
    for (int d = lane; d < TQ_D; d += 32) {
      const uint code = tq_unpack<TQ_BITS>(mine, TQ_D, d);
      if (TQ_BITS == 8) {
        v[d] = float(int(code) - int((code & 128u) << 1));
      } else {
        const float magnitude = magnitudes[code & ((1u << ((TQ_BITS - 1) & 7)) - 1u)];
        v[d] = (code >> (TQ_BITS - 1)) != 0u ? -magnitude : magnitude;
      }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    tq_rotate<TQ_D_M, TQ_D_K>(v, lane, tables + TQ_D_PALEY_BACK);
    float scale = float(scales[vector]);
    bool broken = tq_nan(scale);
#if TQ_PROD
    threadgroup float* v2 = v + TQ_D;
    device const uint* signs = sign_words + ulong(vector) * ulong(tq_width(1, TQ_D));
    for (int d = lane; d < TQ_D; d += 32) {
      v2[d] = tq_unpack<1>(signs, TQ_D, d) != 0u ? -127.0f : 127.0f;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    tq_rotate<TQ_D_M, TQ_D_K>(v2, lane, tables + TQ_D_PALEY_BACK);
    for (int d = lane; d < TQ_D; d += 32) {
      v2[d] = tq_apply_sign(v2[d], tables + TQ_SIGN_CODE_SIGNS, d);
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    // The norm of H^T s2 H^T c2 is 127 D^1.5, at most 2^22: floats hold every partial sum.
    tq_rotate<TQ_D_M, TQ_D_K>(v2, lane, tables + TQ_D_PALEY_BACK);
    const float sign_scale = float(sign_scales[vector]);
    broken = broken || tq_nan(sign_scale);
    const float sign_unit = tq_pow2(-kappa - (depth + 1) / 2 - 2);
#endif
    for (int d = lane; d < TQ_D; d += 32) {
      // Through an integer, so that there is no negative zero.
      float x = float(int(tq_apply_sign(v[d], tables + TQ_SIGNS, d))) * scale;
      x *= tq_pow2(-kappa);
#if TQ_PROD
      float rest = float(int(tq_apply_sign(v2[d], tables + TQ_SIGNS, d))) * sign_scale;
      rest *= sign_unit;
      x += rest;
#endif
#if TQ_FACTORS
      x *= tq_pow2(-int(factors[ulong(vector / sizes[1]) * ulong(TQ_D) + ulong(d)]));
#endif
#if TQ_BASE
      const float unit = tq_pow2(int(base_exponent[vector >> 6]) - 13);
      x += float(base[ulong(vector >> 6) * ulong(TQ_D) + ulong(d)]) * unit;
#endif
      x = broken ? as_type<float>(0x7fc00000) : x;
      out[ulong(vector) * ulong(TQ_D) + ulong(d)] = TQ_TYPE(x);
    }
  }
