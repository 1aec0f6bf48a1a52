// A CUDA runtime without a GPU, for PyTorch's allocator: memory is a number, addresses come from AddressSpace, and the
// work of a stream is over when oracle.cpp says so.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

#include "allocator_blocks.hpp"

using foretrain::Address;

namespace oracle {

std::uint64_t capacity, overhead, reserved;
foretrain::AddressSpace addresses(Address{1} << 46, std::uint64_t{1} << 43);
std::map<Address, std::uint64_t> segments;
std::map<std::uint64_t, std::uint64_t> handles;
struct Event {
  void* stream = nullptr;
  std::uint64_t number = 0;
};
std::map<void*, std::uint64_t> recorded, finished;
std::uint64_t next_handle = 1;

bool fits(std::uint64_t size) { return reserved + overhead + size <= capacity; }

int reserve_addresses(Address* address, std::size_t size, std::size_t, Address, unsigned long long) {
  *address = addresses.take(size);
  return 0;
}
int free_addresses(Address address, std::size_t size) {
  addresses.give_back(address, size);
  return 0;
}
int create(unsigned long long* handle, std::size_t size, const void*, unsigned long long) {
  if (!fits(size)) return 2;
  reserved += size;
  handles[*handle = next_handle++] = size;
  return 0;
}
int release(unsigned long long handle) {
  reserved -= handles.at(handle);
  handles.erase(handle);
  return 0;
}
int attribute(int* value, int, int) {
  *value = 1;
  return 0;
}
int error_text(int, const char** text) {
  *text = "error";
  return 0;
}
int nothing() { return 0; }

}  // namespace oracle

extern "C" {
const char* cudaGetErrorString(int) { return "error"; }
const char* cudaGetErrorName(int) { return "error"; }
int cudaGetLastError() { return 0; }
int cudaGetDevice(int* device) { return *device = 0; }
int cudaSetDevice(int) { return 0; }
int cudaGetDeviceCount(int* count) {
  *count = 1;
  return 0;
}
int cudaDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}
int cudaGetDeviceProperties(void* properties, int) {
  std::memset(properties, 0, 700);
  std::memcpy(static_cast<char*>(properties) + 288, &oracle::capacity, sizeof oracle::capacity);  // totalGlobalMem
  return 0;
}
int cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  *free = oracle::capacity - oracle::overhead - oracle::reserved;
  *total = oracle::capacity;
  return 0;
}
int cudaMalloc(void** address, std::size_t size) {
  if (!oracle::fits(size)) return 2;
  oracle::reserved += size;
  const Address taken = oracle::addresses.take(size);
  oracle::segments[taken] = size;
  *address = reinterpret_cast<void*>(taken);
  return 0;
}
int cudaFree(void* address) {
  const auto found = oracle::segments.find(reinterpret_cast<Address>(address));
  if (found == oracle::segments.end()) return 0;
  oracle::reserved -= found->second;
  oracle::addresses.give_back(found->first, found->second);
  oracle::segments.erase(found);
  return 0;
}
int cudaEventCreateWithFlags(void** event, unsigned) {
  *event = new oracle::Event();
  return 0;
}
int cudaEventDestroy(void* event) {
  delete static_cast<oracle::Event*>(event);
  return 0;
}
int cudaEventRecord(void* event, void* stream) {
  *static_cast<oracle::Event*>(event) = {stream, ++oracle::recorded[stream]};
  return 0;
}
int cudaEventQuery(void* event) {
  const auto* recorded = static_cast<oracle::Event*>(event);
  return recorded->number <= oracle::finished[recorded->stream] ? 0 : 600;
}
int cudaEventSynchronize(void* event) {
  const auto* recorded = static_cast<oracle::Event*>(event);
  auto& finished = oracle::finished[recorded->stream];
  if (finished < recorded->number) finished = recorded->number;
  return 0;
}
int cudaStreamIsCapturing(void*, int* status) { return *status = 0; }
int cudaStreamGetCaptureInfo(void*, int* status, void*, void*, void*, void*, void*) { return *status = 0; }
int cudaStreamCreateWithPriority(void** stream, unsigned, int) {
  *stream = std::malloc(1);
  return 0;
}
int cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { return *least = *greatest = 0; }
int cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long, int* status) {
  const std::map<std::string, void*> known = {
      {"cuMemAddressReserve", reinterpret_cast<void*>(oracle::reserve_addresses)},
      {"cuMemAddressFree", reinterpret_cast<void*>(oracle::free_addresses)},
      {"cuMemCreate", reinterpret_cast<void*>(oracle::create)},
      {"cuMemRelease", reinterpret_cast<void*>(oracle::release)},
      {"cuDeviceGetAttribute", reinterpret_cast<void*>(oracle::attribute)},
      {"cuGetErrorString", reinterpret_cast<void*>(oracle::error_text)},
  };
  const auto found = known.find(name);
  *function = found == known.end() ? reinterpret_cast<void*>(oracle::nothing) : found->second;
  if (status) *status = 0;
  return 0;
}
#define NOTHING(name) \
  int name() { return 0; }
NOTHING(cudaDeviceCanAccessPeer)
NOTHING(cudaDeviceEnablePeerAccess)
NOTHING(cudaDeviceGetDefaultMemPool)
NOTHING(cudaDeviceSynchronize)
NOTHING(cudaEventElapsedTime)
NOTHING(cudaFreeAsync)
NOTHING(cudaGraphNodeGetDependencies)
NOTHING(cudaIpcCloseMemHandle)
NOTHING(cudaIpcGetMemHandle)
NOTHING(cudaIpcOpenMemHandle)
NOTHING(cudaMallocAsync)
NOTHING(cudaMemPoolGetAttribute)
NOTHING(cudaMemPoolSetAccess)
NOTHING(cudaMemPoolSetAttribute)
NOTHING(cudaMemPoolTrimTo)
NOTHING(cudaMemcpy)
NOTHING(cudaMemcpyAsync)
NOTHING(cudaMemcpyPeerAsync)
NOTHING(cudaStreamGetPriority)
NOTHING(cudaStreamQuery)
NOTHING(cudaStreamSynchronize)
NOTHING(cudaStreamWaitEvent)
NOTHING(cudaThreadExchangeStreamCaptureMode)

// oracle.cpp's way in.
void cuda_oracle_start(std::uint64_t capacity, std::uint64_t overhead) {
  oracle::capacity = capacity;
  oracle::overhead = overhead;
}
unsigned long long cuda_oracle_in_use() { return oracle::reserved + oracle::overhead; }
void cuda_oracle_finish(void* stream) { oracle::finished[stream] = oracle::recorded[stream]; }
}
