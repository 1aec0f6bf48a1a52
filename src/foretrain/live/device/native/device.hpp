// Current device and stream of the thread, and CUDA events.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include "log.hpp"

namespace foretrain {

int device_count();
void set_device_count(int count);
int current_device();
void set_current_device(int device);
c10::StreamId current_stream(int device);
void set_current_stream(int device, c10::StreamId stream);
c10::StreamId new_stream(int device);
inline StreamKey current_key(int device) { return stream_key(device, current_stream(device)); }

const at::Generator& default_generator(int device);
// Random numbers for tensors whose values are kept; never the CPU's own generator, which the script may have seeded.
at::Generator& generator_of_values();

// A CUDA event: the number of its last recording.
struct Event {
  EventId id = 0;
  ~Event() { log().forget(id); }
};

// The thread is on `device` while this lives.
class OnDevice {
 public:
  explicit OnDevice(int device) : before_(current_device()) { set_current_device(device); }
  ~OnDevice() { set_current_device(before_); }
  OnDevice(const OnDevice&) = delete;

 private:
  int before_;
};

// Makes torch believe: registers guard, allocator, hooks.
void install_device();
// And its profiler (profiler.cpp).
void install_profiler();

}  // namespace foretrain
