/* Serialised trajectories (rollout.trajectory.v1.Trajectory) into columns, for a learner that reads hundreds of small ones a step.
 *
 * Whatever is not as the workers write it is left to protobuf, which says what is wrong: a field of another kind, a second key,
 * arrays that don't fit each other. Compiled by scripts/kernel for a little-endian machine, called by trajectories.py through
 * ctypes, so no Python header is needed and the interpreter's lock is not held. */

#include <stdint.h>
#include <string.h>

typedef uint8_t u8;
typedef uint64_t u64;
typedef int64_t i64;

enum { VARINT, EIGHT, BYTES, FOUR = 5 }; /* kinds of a field on the wire */

/* Columns; trajectories.py has the same in this order. Texts are places in the payload. */
enum {
  TOKENS, PROMPT_TOKENS, EPOCH, INDEX, SAMPLE, PART, VERSION, OUTCOME,
  PROMPT, PROMPT_END, COMPLETION, COMPLETION_END, MORE, COLUMNS
};

typedef struct {
  const u8 *at, *end; /* not read yet */
} Input;

typedef struct {
  u64 number, kind, value; /* value: of a VARINT, size of BYTES */
  const u8 *at;            /* of the others */
} Field;

static int varint(Input *in, u64 *value) {
  *value = 0;
  for (int shift = 0; shift < 64 && in->at < in->end; shift += 7) {
    const u8 byte = *in->at++;
    *value |= (u64)(byte & 127) << shift;
    if (byte < 128) return shift < 63 || byte < 2;
  }
  return 0;
}

/* The next field; 0 where it is cut short or of no kind that is written today. */
static int next(Input *in, Field *out) {
  u64 tag;
  if (!varint(in, &tag) || tag < 8 || tag > UINT32_MAX) return 0;
  out->number = tag >> 3;
  out->kind = tag & 7;
  out->value = out->kind == EIGHT ? 8 : 4;
  if (out->kind == VARINT) return varint(in, &out->value);
  if (out->kind == BYTES ? !varint(in, &out->value) : out->kind != EIGHT && out->kind != FOUR) return 0;
  if (out->value > (u64)(in->end - in->at)) return 0;
  out->at = in->at;
  in->at += out->value;
  return 1;
}

/* A number that fits its column; most: the largest of its type. */
static int number(const Field *field, u64 most, i64 *column) {
  *column = (i64)field->value;
  return field->kind == VARINT && field->value <= most;
}

static int text(const Field *field, const u8 *payload, i64 *begin, i64 *end) {
  if (field->kind != BYTES) return 0;
  *begin = field->at - payload;
  *end = *begin + (i64)field->value;
  return 1;
}

static int key(const Field *whole, i64 *row) {
  if (whole->kind != BYTES) return 0;
  Input in = {whole->at, whole->at + whole->value};
  for (Field field; in.at < in.end;) {
    if (!next(&in, &field)) return 0;
    switch (field.number) {
      case 2: if (!number(&field, UINT32_MAX, row + EPOCH)) return 0; break;
      case 3: if (!number(&field, INT64_MAX, row + INDEX)) return 0; break;
      case 5: if (!number(&field, UINT32_MAX, row + SAMPLE)) return 0; break;
      case 6: if (!number(&field, UINT32_MAX, row + PART)) return 0; break;
    }
  }
  return 1;
}

/* Lowers row[VERSION] to that of a span; it is below 0 before the first. */
static int span(const Field *whole, i64 *row) {
  if (whole->kind != BYTES) return 0;
  Input in = {whole->at, whole->at + whole->value};
  i64 version = 0;
  for (Field field; in.at < in.end;) {
    if (!next(&in, &field) || (field.number == 1 && !number(&field, INT64_MAX, &version))) return 0;
  }
  if (row[VERSION] < 0 || version < row[VERSION]) row[VERSION] = version;
  return 1;
}

static int trajectory(const u8 *payload, u64 size, i64 *row, double *reward, Field arrays[3]) {
  Input in = {payload, payload + size};
  int keys = 0;
  row[VERSION] = -1;
  for (Field field; in.at < in.end;) {
    if (!next(&in, &field)) return 0;
    switch (field.number) {
      case 1: if (keys++ || !key(&field, row)) return 0; break;
      case 2: arrays[0] = field; break;
      case 3: arrays[1] = field; break;
      case 5: arrays[2] = field; break;
      case 6: if (!number(&field, UINT32_MAX, row + PROMPT_TOKENS)) return 0; break;
      case 7: if (!span(&field, row)) return 0; break;
      case 8: if (field.kind != EIGHT) return 0; memcpy(reward, field.at, 8); break;
      case 10: if (!number(&field, INT32_MAX, row + OUTCOME)) return 0; break;
      case 12: if (!text(&field, payload, row + PROMPT, row + PROMPT_END)) return 0; break;
      case 13: if (!text(&field, payload, row + COMPLETION, row + COMPLETION_END)) return 0; break;
      case 9: case 14: case 15: row[MORE] = 1; break;
    }
  }
  if (row[VERSION] < 0) row[VERSION] = 0;
  for (int at = 0; at < 3; at++) {
    if (arrays[at].kind != BYTES) return 0;
  }
  row[TOKENS] = (i64)arrays[2].value;
  return arrays[0].value == 4 * arrays[2].value && arrays[1].value == arrays[0].value && row[PROMPT_TOKENS] <= row[TOKENS];
}

/* Fills rows [count][COLUMNS] and rewards [count], both 0 before, and the arrays of all trajectories one behind the other, which
 * have room for a ninth of the bytes of all payloads. Returns how many it could read, in turn. */
u64 rollout_trajectories(const u8 *const *payloads, const u64 *sizes, u64 count, i64 *rows, double *rewards, u8 *token_ids,
                         u8 *logprobs, u8 *mask) {
  for (u64 at = 0; at < count; at++) {
    Field arrays[3] = {{.kind = BYTES}, {.kind = BYTES}, {.kind = BYTES}};
    if (!trajectory(payloads[at], sizes[at], rows + at * COLUMNS, rewards + at, arrays)) return at;
    u8 **const to[3] = {&token_ids, &logprobs, &mask};
    for (int which = 0; which < 3; which++) {
      if (arrays[which].value) memcpy(*to[which], arrays[which].at, arrays[which].value);
      *to[which] += arrays[which].value;
    }
  }
  return count;
}
