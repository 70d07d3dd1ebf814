/* Encodes and applies the segments of a weights patch in one pass over memory each. patch.py defines the format,
 * segments_numpy.py does the same in numpy.
 *
 * Elements are 1, 2, 4, or 8 bytes wide; nothing is aligned. For little-endian machines. Called by segments.py. */

#include <stdint.h>
#include <string.h>

#define SEGMENT ((uint64_t)1 << 18) /* elements */
#define HEAD 16                     /* bytes: marks, values, bytes per mark, 0 */
#define DENSE 160                   /* elements per change up to which marks take one byte */
#define LINE 64                     /* bytes */
#define STRIP 256                   /* words of 8 bytes that are compared before the elements of those that differ: they are still in L1 */
#define EARLY 2048                  /* bytes between the prefetch of a line and its use */
#define AHEAD 32                    /* marks between the prefetch of a line and the write */

#define INLINE static inline __attribute__((always_inline))

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;

INLINE u64 padded(u64 size) { return (size + 7) & ~(u64)7; }
INLINE u64 min(u64 a, u64 b) { return a < b ? a : b; }

/* width is a constant wherever these are inlined. The switch over types is what lets loops be vectorized. */
INLINE u64 load(const u8 *from, u64 width) {
  u16 two;
  u32 four;
  u64 eight;
  switch (width) {
    case 1: return *from;
    case 2: return memcpy(&two, from, 2), two;
    case 4: return memcpy(&four, from, 4), four;
    default: return memcpy(&eight, from, 8), eight;
  }
}
INLINE void store(u8 *to, u64 value, u64 width) { memcpy(to, &value, width); }

/* Append one element, and count it only if it differs. A branch instead would be mispredicted for every fourth line
 * of memory at one change in a hundred, which costs more than everything else. */
INLINE u64 add_if_different(const u8 *old, const u8 *new, u64 width, u64 at, u64 found, u32 *places, u8 *values) {
  const u64 value = load(new + at * width, width);
  places[found] = at;
  store(values + found * width, value, width);
  return found + (load(old + at * width, width) != value);
}

/* Write the indices of the elements that differ, ascending, to places and their new values to values, both with room
 * for count. Returns their number. */
INLINE u64 find(const u8 *old, const u8 *new, u64 width, u64 count, u32 *places, u8 *values) {
  const u64 lanes = 8 / width, words = count * width / LINE * (LINE / 8);
  u64 found = 0;
  for (u64 first = 0; first < words; first += STRIP) {
    const u64 stop = min(words, first + STRIP);
    u32 differing[STRIP];
    u64 some = 0;
    for (u64 line = first; line < stop; line += LINE / 8) {
      __builtin_prefetch(old + line * 8 + EARLY);
      __builtin_prefetch(new + line * 8 + EARLY);
      for (u64 word = line; word < line + LINE / 8; word++) {
        differing[some] = word;
        some += load(old + word * 8, 8) != load(new + word * 8, 8);
      }
    }
    for (u64 i = 0; i < some; i++)
      for (u64 lane = 0; lane < lanes; lane++) found = add_if_different(old, new, width, differing[i] * lanes + lane, found, places, values);
  }
  for (u64 at = words * lanes; at < count; at++) found = add_if_different(old, new, width, at, found, places, values);
  return found;
}

/* Write the distances between places as marks. Returns the number of marks. */
INLINE u64 mark(const u32 *places, u64 found, u64 size, u8 *marks) {
  const u64 highest = ((u64)1 << 8 * size) - 1;
  u64 made = 0, before = 0;
  for (u64 i = 0; i < found; i++) {
    u64 distance = places[i] - before;
    before = places[i];
    for (; distance >= highest; distance -= highest) store(marks + made++ * size, highest, size);
    store(marks + made++ * size, distance, size);
  }
  return made;
}

INLINE u64 encode(const u8 *old, const u8 *new, u64 width, u64 count, u32 *places, u8 *out, u64 *changed) {
  u8 *to = out, *new_values = (u8 *)(places + SEGMENT);
  for (u64 first = 0; first < count; first += SEGMENT) {
    const u8 *base = old + first * width, *wanted = new + first * width;
    const u64 here = min(SEGMENT, count - first);
    const u64 found = find(base, wanted, width, here, places, new_values);
    const u32 size = found * DENSE >= here ? 1 : 2;
    const u64 marks = size == 1 ? mark(places, found, 1, to + HEAD) : mark(places, found, 2, to + HEAD);
    const u32 head[4] = {marks, found, size, 0};
    memcpy(to, head, HEAD);
    u8 *values = to + HEAD + padded(marks * size);
    memset(to + HEAD + marks * size, 0, values - (to + HEAD + marks * size));
    memcpy(values, new_values, found * width);
    to = values + padded(found * width);
    memset(values + found * width, 0, to - (values + found * width));
    *changed += found;
  }
  return to - out;
}

/* Encode count elements as segments. places: scratch for the places and then the values of one segment. out: as large
 * as segments.py computes. Returns the bytes written, and adds the number of elements that differ to *changed. */
u64 rollout_encode(const u8 *old, const u8 *new, u64 width, u64 count, u32 *places, u8 *out, u64 *changed) {
  switch (width) {
    case 1: return encode(old, new, 1, count, places, out, changed);
    case 2: return encode(old, new, 2, count, places, out, changed);
    case 4: return encode(old, new, 4, count, places, out, changed);
    default: return encode(old, new, 8, count, places, out, changed);
  }
}

/* Whether the marks address exactly `values` values, all within count elements. */
INLINE int fits(const u8 *marks, u64 made, u64 size, u64 values, u64 count) {
  const u32 highest = ((u32)1 << 8 * size) - 1;
  u64 end = 0, skips = 0;
  for (u64 i = 0; i < made; i++) {
    const u32 distance = load(marks + i * size, size);
    end += distance;
    skips += distance == highest;
  }
  return skips == made - values && (made == 0 || end < count);
}

/* Validate the segments of count elements, from byte `at` of body on. Writes where each begins to places. Returns where
 * the last one ends, or -1 - n if segment n is truncated, malformed, or addresses an element outside of its own. */
int64_t rollout_check(const u8 *body, u64 length, u64 at, u64 width, u64 count, u64 *places) {
  for (u64 n = 0; n * SEGMENT < count; n++) {
    u32 head[4];
    if (length - at < HEAD) return -1 - (int64_t)n;
    memcpy(head, body + at, HEAD);
    const u64 made = head[0], values = head[1], size = head[2], here = min(SEGMENT, count - n * SEGMENT);
    if (values > made || (size != 1 && size != 2)) return -1 - (int64_t)n;
    if (length - at - HEAD < padded(made * size) + padded(values * width)) return -1 - (int64_t)n;
    const u8 *marks = body + at + HEAD;
    if (!(size == 1 ? fits(marks, made, 1, values, here) : fits(marks, made, 2, values, here))) return -1 - (int64_t)n;
    places[n] = at;
    at += HEAD + padded(made * size) + padded(values * width);
  }
  return at;
}

INLINE void scatter(const u8 *marks, u64 made, u64 size, const u8 *values, u64 width, u8 *target) {
  const u64 highest = ((u64)1 << 8 * size) - 1;
  u64 place = 0, asked = 0;
  for (u64 i = 0; i < min(AHEAD, made); i++) {
    asked += load(marks + i * size, size);
    __builtin_prefetch(target + asked * width, 1);
  }
  for (u64 i = 0; i < made; i++) {
    if (i + AHEAD < made) {
      asked += load(marks + (i + AHEAD) * size, size);
      __builtin_prefetch(target + asked * width, 1);
    }
    const u64 distance = load(marks + i * size, size);
    place += distance;
    if (distance == highest) continue;
    store(target + place * width, load(values, width), width);
    values += width;
  }
}

INLINE void write(const u8 *body, const u64 *places, u64 segments, u64 width, u8 *target) {
  for (u64 n = 0; n < segments; n++) {
    u32 head[4];
    memcpy(head, body + places[n], HEAD);
    const u8 *marks = body + places[n] + HEAD, *values = marks + padded((u64)head[0] * head[2]);
    u8 *to = target + n * SEGMENT * width;
    if (head[2] == 1) scatter(marks, head[0], 1, values, width, to);
    else scatter(marks, head[0], 2, values, width, to);
  }
}

/* Write the values of validated segments. target: the first element of the first segment. */
void rollout_write(const u8 *body, const u64 *places, u64 segments, u64 width, u8 *target) {
  switch (width) {
    case 1: write(body, places, segments, 1, target); return;
    case 2: write(body, places, segments, 2, target); return;
    case 4: write(body, places, segments, 4, target); return;
    default: write(body, places, segments, 8, target); return;
  }
}
