// Profilers and named ranges of the script; see profiler.cpp.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "log.hpp"

namespace foretrain {

// A function that a profiler of the script has observed; `end` is -1 if it was not over.
struct Function {
  std::uint64_t thread;  // as PyTorch numbers threads
  Time begin, end;       // by the host's virtual clock
  std::int64_t real_begin, real_end;  // ns since the epoch
};

struct Ran {
  Launch launch;
  Time begin, end;  // on its stream
};

struct Profile {
  std::vector<Function> functions;  // in the order of their beginnings
  std::vector<Ran> launches;
};

void begin_profile();
// Stops the host until the GPU is done, where `launches` are wanted.
Profile end_profile(bool launches);
// Of the kernel; or "nccl:" and the operation as foretrain/live/event_log.py calls it.
std::string name_of(const Launch& launch);

// A range of this thread begins, and the last that has begun ends.
void annotate(std::string_view name);
void annotate_end();

}  // namespace foretrain
