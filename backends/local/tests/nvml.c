/* What is called of NVML, with the layouts and numbers of nvml.h: three GPUs.
   0: 80 GB, 600 MB of it reserved, two processes. 1: lost. 2: split (MIG), its memory known. */
#include <string.h>

typedef unsigned int uint;
typedef unsigned long long ull;
typedef struct { ull total, free, used; } memory_t;
typedef struct { uint version; ull total, reserved, free, used; } memory_v2_t;
typedef struct { uint pid; ull used; uint gpu_instance, compute_instance; } process_t;

#define MB 1000000ull
static int gpus[] = {0, 1, 2};
#define INDEX(handle) (*(int *)(handle))

int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(uint flags) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int value) { return value == 15 ? "GPU is lost" : "Not Supported"; }
int nvmlSystemGetDriverVersion(char *text, uint room) { strncpy(text, "580.65.06", room); return 0; }
int nvmlDeviceGetCount_v2(uint *count) { *count = 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(uint index, void **handle) { *handle = &gpus[index]; return 0; }
int nvmlDeviceGetName(void *handle, char *text, uint room) { strncpy(text, "NVIDIA H20", room); return 0; }
int nvmlDeviceGetUUID(void *handle, char *text, uint room) {
    strncpy(text, "GPU-0", room);
    text[4] += INDEX(handle);
    return 0;
}
int nvmlDeviceGetMemoryInfo(void *handle, memory_t *memory) {
    if (INDEX(handle) == 1) return 15;
    memory->total = 80000 * MB, memory->used = 9600 * MB, memory->free = memory->total - memory->used;
    return 0;
}
int nvmlDeviceGetMemoryInfo_v2(void *handle, memory_v2_t *memory) {
    if (memory->version != 0x02000028) return 25;
    if (INDEX(handle) == 1) return 15;
    memory->total = 80000 * MB, memory->reserved = 600 * MB, memory->used = 9000 * MB + 1;
    memory->free = memory->total - memory->reserved - memory->used;
    return 0;
}
int nvmlDeviceGetMigMode(void *handle, uint *now, uint *pending) {
    if (INDEX(handle) == 0) return 3;
    *now = *pending = 1;
    return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, uint *count, process_t *found) {
    if (INDEX(handle) != 0) { *count = 0; return 0; }
    uint room = *count;
    *count = 2;
    if (room < 2) return 7;
    found[0] = (process_t){1, 7000 * MB, ~0u, ~0u};
    found[1] = (process_t){4194000, ~0ull, ~0u, ~0u};
    return 0;
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *handle, uint *count, process_t *found) { *count = 0; return 3; }
