/* RMSNorm, SwiGLU, and rotary embeddings, float32, forward and backward: one pass over memory each, where
 * torch's operations take two to seven. trainer/fused.py has the formulas.
 *
 * Arrays are contiguous. Threads share the rows; sums over rows are added up by blocks of a fixed size, so the
 * result does not depend on the number of threads. Called by layers.py. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 128     /* rows per partial sum, as in layers.py */
#define PIECE 4096    /* numbers per unit of work of a thread */
#define ALONE 32768   /* numbers up to which one thread is used */

#if !defined(__x86_64__) || !defined(__GLIBC__) || !defined(__GNUC__) || defined(__clang__)
#define CLONES
#elif __GNUC__ >= 12
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else /* these versions do not know the levels */
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#endif

typedef int64_t i64;

static inline i64 min(i64 a, i64 b) { return a < b ? a : b; }

/* y = x * scale * weight, scale = 1 / sqrt(mean(x^2) + eps) */
CLONES static void norm_rows(const float *restrict x, const float *restrict weight, float eps, i64 rows, i64 width,
                             float *restrict y, float *restrict scale) {
  for (i64 row = 0; row < rows; row++, x += width, y += width) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (i64 i = 0; i < width; i++) squares += x[i] * x[i];
    const float by = scale[row] = 1.0f / sqrtf(squares / (float)width + eps);
#pragma omp simd
    for (i64 i = 0; i < width; i++) y[i] = x[i] * by * weight[i];
  }
}

/* dx = scale * (dy w - u mean(dy w u)), dw = sum(dy u), u = x * scale */
CLONES static void norm_rows_backward(const float *restrict dy, const float *restrict x, const float *restrict weight,
                                  const float *restrict scale, i64 rows, i64 width, float *restrict dx, float *restrict dw) {
  memset(dw, 0, sizeof(float) * (size_t)width);
  for (i64 row = 0; row < rows; row++, x += width, dy += width, dx += width) {
    const float by = scale[row];
    float along = 0;
#pragma omp simd reduction(+ : along)
    for (i64 i = 0; i < width; i++) {
      const float product = dy[i] * x[i] * by;
      dw[i] += product;
      along += product * weight[i];
    }
    const float less = along / (float)width * by * by;
#pragma omp simd
    for (i64 i = 0; i < width; i++) dx[i] = by * dy[i] * weight[i] - less * x[i];
  }
}

/* exp, clamped to [-87, 88], accurate to 2 units in the last place */
static inline float exponential(float x) {
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  union {
    float value;
    uint32_t bits;
  } rounded = {x * 1.44269504f + 12582912.0f}, two; /* 1.5 * 2^23 rounds to an integer n, in the low bits */
  const float n = rounded.value - 12582912.0f;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  two.bits = (rounded.bits + 127) << 23;
  return p * two.value;
}

CLONES static void swiglu_piece(const float *restrict gate, const float *restrict up, i64 size, float *restrict out) {
#pragma omp simd
  for (i64 i = 0; i < size; i++) out[i] = gate[i] / (1.0f + exponential(-gate[i])) * up[i];
}

/* silu'(g) = s (1 + g (1 - s)), s = 1 / (1 + exp(-g)) */
CLONES static void swiglu_piece_backward(const float *restrict d, const float *restrict gate, const float *restrict up, i64 size,
                                   float *restrict dgate, float *restrict dup) {
#pragma omp simd
  for (i64 i = 0; i < size; i++) {
    const float s = 1.0f / (1.0f + exponential(-gate[i]));
    dup[i] = d[i] * gate[i] * s;
    dgate[i] = d[i] * up[i] * s * (1.0f + gate[i] * (1.0f - s));
  }
}

/* Tokens [first, stop), each of heads * 2 * half numbers. backward: by the transposed matrix. */
CLONES static void rotate_tokens(const float *restrict x, const float *restrict cosines, const float *restrict sines, i64 first,
                                 i64 stop, i64 period, i64 heads, i64 half, int backward, float *restrict y) {
  for (i64 token = first; token < stop; token++) {
    const float *restrict c = cosines + token % period * 2 * half, *restrict s = sines + token % period * 2 * half;
    for (i64 head = token * heads; head < (token + 1) * heads; head++) {
      const float *restrict from = x + head * 2 * half;
      float *restrict to = y + head * 2 * half;
      if (backward) {
#pragma omp simd
        for (i64 i = 0; i < half; i++) {
          const float a = from[i], b = from[half + i];
          to[i] = a * c[i] + b * s[half + i];
          to[half + i] = b * c[half + i] - a * s[i];
        }
      } else {
#pragma omp simd
        for (i64 i = 0; i < half; i++) {
          const float a = from[i], b = from[half + i];
          to[i] = a * c[i] - b * s[i];
          to[half + i] = b * c[half + i] + a * s[half + i];
        }
      }
    }
  }
}

void rollout_rms_norm(const float *x, const float *weight, float eps, i64 rows, i64 width, float *y, float *scale, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > ALONE)
  for (i64 at = 0; at < rows; at += BLOCK)
    norm_rows(x + at * width, weight, eps, min(BLOCK, rows - at), width, y + at * width, scale + at);
}

/* dw: [blocks of rows, width] */
void rollout_rms_norm_backward(const float *dy, const float *x, const float *weight, const float *scale, i64 rows, i64 width, float *dx,
                       float *dw, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > ALONE)
  for (i64 at = 0; at < rows; at += BLOCK)
    norm_rows_backward(dy + at * width, x + at * width, weight, scale + at, min(BLOCK, rows - at), width, dx + at * width,
                   dw + at / BLOCK * width);
}

void rollout_swiglu(const float *gate, const float *up, i64 size, float *out, int threads) {
#pragma omp parallel for num_threads(threads) if (size > ALONE)
  for (i64 at = 0; at < size; at += PIECE) swiglu_piece(gate + at, up + at, min(PIECE, size - at), out + at);
}

void rollout_swiglu_backward(const float *d, const float *gate, const float *up, i64 size, float *dgate, float *dup, int threads) {
#pragma omp parallel for num_threads(threads) if (size > ALONE)
  for (i64 at = 0; at < size; at += PIECE)
    swiglu_piece_backward(d + at, gate + at, up + at, min(PIECE, size - at), dgate + at, dup + at);
}

/* x, y: [tokens, heads, 2 * half]. cosines, sines: [period, 2 * half]; token t uses row t % period. */
void rollout_rotary(const float *x, const float *cosines, const float *sines, i64 tokens, i64 period, i64 heads, i64 half, int backward,
                    float *y, int threads) {
#pragma omp parallel for num_threads(threads) if (tokens * heads * half > ALONE)
  for (i64 at = 0; at < tokens; at += BLOCK)
    rotate_tokens(x, cosines, sines, at, min(at + BLOCK, tokens), period, heads, half, backward, y);
}
