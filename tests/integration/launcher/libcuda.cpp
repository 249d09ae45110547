// A driver's library that answers as one of a machine with two GPUs would: what the probe asks, and no more. The second
// argument of the compiler's command, -DINIT=..., is what cuInit returns.
#include <cstddef>
#include <cstring>

#ifndef INIT
#define INIT 0
#endif

namespace {
const char* const NAMES[] = {"NVIDIA H200", "NVIDIA L4"};
const int CAPABILITIES[][2] = {{9, 0}, {8, 9}};
const size_t GIB = size_t{1} << 30;
const size_t TOTALS[] = {139 * GIB, 22 * GIB};
bool context = false;
}  // namespace

extern "C" {
int cuDriverGetVersion(int* version) {
  *version = 13020;
  return 0;
}
int cuInit(unsigned flags) { return flags == 0 ? INIT : 1; }
int cuDeviceGetCount(int* count) {
  *count = 2;
  return 0;
}
int cuDeviceGet(int* device, int ordinal) {
  *device = 40 + ordinal;
  return 0;
}
int cuDeviceGetName(char* name, int bytes, int device) {
  std::strncpy(name, NAMES[device - 40], bytes);
  return 0;
}
int cuDeviceTotalMem_v2(size_t* bytes, int device) {
  *bytes = TOTALS[device - 40];
  return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  if (attribute != 75 && attribute != 76) return 1;
  *value = CAPABILITIES[device - 40][attribute - 75];
  return 0;
}
int cuDevicePrimaryCtxRetain(void** made, int device) {
  static int room;
  *made = &room;
  return device == 40 ? 0 : 1;
}
int cuCtxSetCurrent(void* given) {
  context = given != nullptr;
  return 0;
}
int cuMemGetInfo_v2(size_t* free, size_t* total) {
  if (!context) return 201;
  *free = 100 * GIB;
  *total = TOTALS[0];
  return 0;
}
}
