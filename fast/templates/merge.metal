// Second dispatch of a long attention: the groups' sums of a query meet in the tree of section 5, then the output.
// A simdgroup owns a query; MERGE_ROWS simdgroups a threadgroup.

threadgroup float tg_packed[MERGE_ROWS * DV];
threadgroup float tg_raw[MERGE_ROWS * DV];
threadgroup float tg_weight_high[64];
threadgroup float tg_weight_low[64];

const int tid = int(thread_position_in_threadgroup.x);
const int lane = int(thread_index_in_simdgroup);
const int sg = int(simdgroup_index_in_threadgroup);
const int kv_heads = meta[META_KV_HEADS], group = meta[META_GROUP], queries = meta[META_QUERIES];
const int heads = kv_heads * group;
const int blocks = (group * queries + ROWS - 1) / ROWS;
const int groups = meta[META_GROUPS];
for (int at = tid; at < 64; at += 32 * MERGE_ROWS) {
  const uint both = v_tables[TQ_WEIGHTS + at];
  tg_weight_high[at] = float(both & 0xffffu);
  tg_weight_low[at] = float(both >> 16);
}
threadgroup_barrier(mem_flags::mem_threadgroup);

const int row = int(threadgroup_position_in_grid.x) * MERGE_ROWS + sg;
if (row < meta[META_WORK] * ROWS) {
  const int work = row / ROWS, r = row % ROWS;
  const int kv = work / blocks, block = work % blocks;
  const int batch_row = kv / kv_heads, head = kv % kv_heads;
  const int m = block * ROWS + r;
  if (m < group * queries) {
    // The exponents of the tree are those of its largest leaf; each coordinate goes through the tree on its own.
    device const int* my_tails = tails + (work * groups * ROWS + r) * TAIL;
    int met = 0, packed_exponent = TQ_IDENTITY, raw_exponent = TQ_IDENTITY, den_exponent = TQ_IDENTITY;
    float den = 0.0f;
    for (int d = lane - 32; d < DV; d += 32) {
      // The round before the first coordinate sums den, the same in all lanes.
      const bool first = d < 0;
      float stack_a[MERGE_LEVELS], stack_b[MERGE_LEVELS];
      int stack_x[MERGE_LEVELS], stack_y[MERGE_LEVELS];
      float a = 0.0f, b = 0.0f;
      int x = TQ_IDENTITY, y = TQ_IDENTITY;
      for (int g = 0; g < groups; g++) {
        device const int* tail = my_tails + g * ROWS * TAIL;
        device const float* at = sums + ((work * groups + g) * ROWS + r) * 2 * DV;
        a = first ? as_type<float>(tail[3]) : at[d];
        b = first ? 0.0f : at[DV + d];
        x = first ? tail[2] : tail[0];
        y = first ? TQ_IDENTITY : tail[1];
        met |= tail[4];
        int level = 0;
        for (; ((g >> level) & 1) != 0; level++) {
          a = tq_merge(stack_a[level], stack_x[level], a, x);
          b = tq_merge(stack_b[level], stack_y[level], b, y);
          x = max(x, stack_x[level]);
          y = max(y, stack_y[level]);
        }
        stack_a[level] = a;
        stack_b[level] = b;
        stack_x[level] = x;
        stack_y[level] = y;
      }
      a = 0.0f;
      b = 0.0f;
      x = TQ_IDENTITY;
      y = TQ_IDENTITY;
      for (int level = 0; (groups >> level) != 0; level++) {
        if (((groups >> level) & 1) != 0) {
          a = tq_merge(stack_a[level], stack_x[level], a, x);
          b = tq_merge(stack_b[level], stack_y[level], b, y);
          x = max(x, stack_x[level]);
          y = max(y, stack_y[level]);
        }
      }
      if (first) {
        den = a;
        den_exponent = x;
      } else {
        tg_packed[sg * DV + d] = a;
        tg_raw[sg * DV + d] = b;
        packed_exponent = x;
        raw_exponent = y;
      }
    }
    const int h = head * group + m % group;
#if HAS_SINKS
    den = tq_add_sink(den, den_exponent, float(sinks[h]), den_exponent, met, tg_weight_high, tg_weight_low);
#endif
    // Lanes without a coordinate (head sizes below 32) have no exponents of their own.
    packed_exponent = simd_max(packed_exponent);
    raw_exponent = simd_max(raw_exponent);
    tq_write_output(tg_packed + sg * DV, tg_raw + sg * DV, packed_exponent, raw_exponent, den_exponent, den, met, v_tables,
                    out + ((batch_row * heads + h) * queries + m / group) * DV, lane);
  }
}
