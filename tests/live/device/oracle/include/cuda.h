#pragma once
#include <cuda_runtime_api.h>
#define CUDA_VERSION 13000
