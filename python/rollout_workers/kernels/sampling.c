/* One token per row of logits, float32, in two to four passes over a row where torch's operations take eight over
 * all rows. sampler.py and philox.py of the engine define the results.
 *
 * Arrays are contiguous. Threads share the rows; the bits of a row depend on that row alone. Called by sampling.py. */

#include <math.h>
#include <stdint.h>

#define BLOCK 64     /* tokens per partial sum */
#define ALONE 32768  /* numbers up to which one thread is used */

#if !defined(__x86_64__) || !defined(__GLIBC__) || !defined(__GNUC__) || defined(__clang__)
#define CLONES
#elif __GNUC__ >= 12
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else /* these versions do not know the levels */
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#endif

typedef int64_t i64;

static inline i64 min(i64 a, i64 b) { return a < b ? a : b; }

/* exp for x <= 0, accurate to 2 units in the last place; 0 below -87. NaN stays NaN. */
static inline float exponential(float x) {
  const float clamped = x < -87.0f ? -87.0f : x;
  union {
    float value;
    uint32_t bits;
  } rounded = {clamped * 1.44269504f + 12582912.0f}, two; /* 1.5 * 2^23 rounds to an integer n, in the low bits */
  const float n = rounded.value - 12582912.0f;
  const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  two.bits = (rounded.bits + 127) << 23;
  return x < -87.0f ? 0.0f : p * two.value;
}

/* The maximum; NaN is ignored. */
CLONES static float largest(const float *restrict x, i64 width) {
  float most = -INFINITY;
#pragma omp simd reduction(max : most)
  for (i64 i = 0; i < width; i++) most = x[i] > most ? x[i] : most;
  return most;
}

/* The sum of exp((x - most) * by) of all tokens; those of each block go to sums. */
CLONES static double total(const float *restrict x, i64 width, float most, float by, double *restrict sums) {
  double all = 0;
  for (i64 at = 0; at < width; at += BLOCK) {
    const i64 stop = min(at + BLOCK, width);
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (i64 i = at; i < stop; i++) sum += exponential((x[i] - most) * by);
    sums[at / BLOCK] = sum;
    all += sum;
  }
  return all;
}

CLONES static void exponentials(const float *restrict x, i64 size, float most, float by, float *restrict weights) {
#pragma omp simd
  for (i64 i = 0; i < size; i++) weights[i] = exponential((x[i] - most) * by);
}

/* The first token whose cumulative sum exceeds `below`, never one of probability 0. */
static i64 invert(const float *x, i64 width, float most, float by, const double *sums, double below) {
  i64 block = 0, found = width - 1;
  double before = 0;
  while ((block + 1) * BLOCK < width && !(before + sums[block] > below)) before += sums[block++];
  const i64 start = block * BLOCK, size = min(BLOCK, width - start);
  float weights[BLOCK];
  exponentials(x + start, size, most, by, weights);
  for (i64 i = 0; i < size; i++) {
    if (!(weights[i] > 0)) continue;
    found = start + i;
    if ((before += weights[i]) > below) break;
  }
  return found;
}

static i64 first(const float *x, i64 width, float value) {
  for (i64 i = 0; i < width; i++)
    if (x[i] == value) return i;
  return width - 1;
}

/* temperature: above 0, per row, or NULL if all are 1. greedy: per row, or NULL if none is. */
void rollout_sample(const float *logits, i64 rows, i64 width, const double *uniform, const float *temperature, const uint8_t *greedy,
                    i64 *tokens, float *logprobs, float *raw, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > ALONE)
  for (i64 row = 0; row < rows; row++) {
    const float *x = logits + row * width;
    const float heat = temperature ? temperature[row] : 1.0f, most = largest(x, width);
    double sums[width / BLOCK + 1];
    double all = total(x, width, most, 1.0f, sums);
    const double plain = log(all);
    if (greedy && greedy[row]) {
      tokens[row] = first(x, width, most);
      raw[row] = (float)((double)(x[tokens[row]] - most) - plain);
      logprobs[row] = isfinite(raw[row]) ? 0.0f : raw[row];
      continue;
    }
    if (heat != 1.0f) all = total(x, width, most, 1.0f / heat, sums);
    const i64 token = invert(x, width, most, 1.0f / heat, sums, fmin(uniform[row] * all, all * (1 - 0x1p-50)));
    const double above = x[token] - most;
    tokens[row] = token;
    raw[row] = (float)(above - plain);
    logprobs[row] = heat == 1.0f ? raw[row] : (float)(above / heat - log(all));
  }
}

static inline double unit(uint32_t high, uint32_t low) { return (double)(((uint64_t)high << 21) ^ (low >> 11)) * 0x1p-53; }

/* Philox4x32-10: out [rows, count] holds numbers start .. start + count of each seed. start, count: even. */
void rollout_uniforms(const uint64_t *seeds, const i64 *start, i64 rows, i64 count, double *out) {
  for (i64 row = 0; row < rows; row++)
    for (i64 at = 0; at < count; at += 2, out += 2) {
      const uint64_t pair = (uint64_t)(start[row] + at) / 2;
      uint32_t k0 = (uint32_t)seeds[row], k1 = (uint32_t)(seeds[row] >> 32);
      uint32_t c0 = (uint32_t)pair, c1 = (uint32_t)(pair >> 32), c2 = 0, c3 = 0;
      for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
        const uint64_t left = (uint64_t)0xD2511F53u * c0, right = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(right >> 32) ^ c1 ^ k0;
        c2 = (uint32_t)(left >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)right;
        c3 = (uint32_t)left;
      }
      out[0] = unit(c0, c1);
      out[1] = unit(c2, c3);
    }
}
