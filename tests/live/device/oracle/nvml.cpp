// As much of NVIDIA's management library as PyTorch asks when memory runs out or an expandable segment is mapped.
#include <unistd.h>

extern "C" {
unsigned long long cuda_oracle_in_use();

struct Process {
  unsigned id;
  unsigned long long memory;
};

int nvmlInit_v2() { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) {
  *device = nullptr;
  return 0;
}
int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, Process* processes) {
  *count = 1;
  processes[0] = {static_cast<unsigned>(getpid()), cuda_oracle_in_use()};
  return 0;
}
int nvmlDeviceGetNvLinkRemoteDeviceType() { return 3; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2() { return 3; }
int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = 13000;
  return 0;
}
int nvmlDeviceGetGpuFabricInfoV() { return 3; }
}
