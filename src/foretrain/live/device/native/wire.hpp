// Layout of a rank's log; foretrain/live/event_log.py has the same layout, and the meaning of the fields.
#pragma once

#include <cstdint>

namespace foretrain::wire {

enum Kind : std::uint8_t { RUN = 1, RECORD, WAIT, COLLECTIVE, MESSAGE, SPLITS, GROUP, ASK, FORGET, NOTE, TASKS, BEGIN, READY };

enum Operation : std::uint16_t {
  ALL_REDUCE,
  ALL_GATHER,
  REDUCE_SCATTER,
  BROADCAST,
  REDUCE,
  ALL_TO_ALL,
  GATHER,
  SCATTER,
  BARRIER
};

enum Question : std::uint16_t { STREAM, DEVICE, EVENT, QUERY_STREAM, QUERY_EVENT, ELAPSED, VALUES, LEAVE, ROOM };

enum Note : std::uint16_t { STEP, MEMORY, WARNING, ANNOTATION, COST, NAME, RANK };

enum State : std::uint32_t { RUNNING, ASKING };

#pragma pack(push, 1)
struct Header {
  std::uint32_t records, payload;
  std::int64_t host;
  std::uint32_t state, reserved;
};

struct Record {
  std::uint8_t kind, flag;
  std::uint16_t code;
  std::int32_t stream;
  std::int64_t a, b, c, host;
  std::uint32_t payload, extra;
};

struct Kernel {
  std::int32_t name;
  std::uint32_t provenance;
  std::int64_t launched, duration;
};

struct Contribution {
  std::uint32_t rank, members, bytes;
};

struct Answer {
  std::uint32_t status, payload;
  std::int64_t time, value;
};
#pragma pack(pop)

static_assert(sizeof(Header) == 24 && sizeof(Record) == 48 && sizeof(Kernel) == 24 && sizeof(Answer) == 24);

}  // namespace foretrain::wire
