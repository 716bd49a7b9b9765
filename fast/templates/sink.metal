// Section 5: the attention sink joins den, on the right, once per query. `met` remembers a sink that is NaN.
inline float tq_add_sink(float den, int den_exponent, float sink, thread int& exponent, thread int& met,
                         threadgroup const float* high, threadgroup const float* low) {
  exponent = den_exponent;
  if (tq_nan(sink)) {
    met |= MET_POISON;
    return den;
  }
  if (as_type<uint>(sink) == 0xff800000u) {
    return den;
  }
  const int fixed = tq_natural_logit(sink);
  const int x = (fixed + 4095) >> 12;
  exponent = max(den_exponent, x);
  return tq_merge(den, den_exponent, float(tq_weight(x * 4096 - fixed, high, low)), x);
}
