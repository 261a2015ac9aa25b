/* libnvidia-ml.so.1 of the software GPU: what its driver measured, for each device and process. */
#include "gpu.h"

#include <stdio.h>
#include <string.h>

struct listed {
    unsigned pid;
    unsigned long long used;
    unsigned instance, compute_instance;
};

static int index_of(void *device) { return (int)((uint64_t)device - 1); }
static void uuid_of(int index, char *text, size_t size)
{
    unsigned b = 0xa0 + (unsigned)index;
    snprintf(text, size, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b, b, b, b, b, b, b, b, b, b, b, b,
             b, b, b, b);
}

API int nvmlInit_v2(void) { return state->device_bytes != 0 ? OK : 999; }
API int nvmlShutdown(void) { return OK; }
API int nvmlDeviceGetCount_v2(unsigned *count) { return *count = state->devices == 0 ? 1 : (unsigned)state->devices, OK; }
API int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device)
{
    unsigned count;
    nvmlDeviceGetCount_v2(&count);
    return index < count ? (*device = (void *)(uint64_t)(index + 1), OK) : INVALID;
}
API int nvmlDeviceGetHandleByUUID(const char *uuid, void **device)
{
    char text[64];
    for (unsigned i = 0; nvmlDeviceGetHandleByIndex_v2(i, device) == OK; i++) {
        uuid_of((int)i, text, sizeof text);
        if (strcmp(text, uuid) == 0)
            return OK;
    }
    return 6;
}
API int nvmlDeviceGetUUID(void *device, char *text, unsigned size) { return uuid_of(index_of(device), text, size), OK; }
API int nvmlDeviceGetName(void *device, char *text, unsigned size) { return (void)device, snprintf(text, size, "software GPU"), OK; }
API int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *info)
{
    size_t left, whole;
    sd_memory(index_of(device), &left, &whole);
    return info[0] = whole, info[1] = left, info[2] = whole - left, OK;
}
static unsigned list_processes(void *device, unsigned most, struct listed *list)
{
    unsigned found = 0;
    __atomic_add_fetch(&state->counts, 1, __ATOMIC_SEQ_CST);
    for (int i = 0; i < MOST_PROCESSES && found < most; i++) {
        uint64_t pid = __atomic_load_n(&state->processes[i].pid, __ATOMIC_SEQ_CST);
        if (pid == 0 || sd_is_dead(i))
            continue;
        list[found] = (struct listed){.pid = (unsigned)(pid + state->pid_offset)};
        list[found++].used = __atomic_load_n(&state->processes[i].used_on[index_of(device)], __ATOMIC_SEQ_CST);
    }
    return found;
}
API int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, struct listed *list)
{
    return *count = list_processes(device, *count, list), OK;
}

/* The first forms of these functions, which drivers keep. */
API int nvmlInit(void) { return nvmlInit_v2(); }
API int nvmlDeviceGetCount(unsigned *count) { return nvmlDeviceGetCount_v2(count); }
API int nvmlDeviceGetHandleByIndex(unsigned index, void **device) { return nvmlDeviceGetHandleByIndex_v2(index, device); }
API int nvmlDeviceGetComputeRunningProcesses_v2(void *device, unsigned *count, struct listed *list)
{
    return nvmlDeviceGetComputeRunningProcesses_v3(device, count, list);
}
struct listed_first {
    unsigned pid;
    unsigned long long used;
};
API int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, struct listed_first *list)
{
    struct listed whole[MOST_PROCESSES];
    unsigned found = list_processes(device, MOST_PROCESSES, whole), room = *count;
    *count = found;
    if (found > room)
        return 7; /* NVML_ERROR_INSUFFICIENT_SIZE */
    for (unsigned i = 0; i < found; i++)
        list[i] = (struct listed_first){.pid = whole[i].pid, .used = whole[i].used};
    return OK;
}
