/* Two GPUs without MIG, as far as NVIDIA's device plugin asks NVML about them. Loaded as libnvidia-ml.so.1. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TIMED_OUT = 10 };
enum { GPUS = 2 };

typedef struct gpu *device_handle;
struct gpu {
    unsigned int index;
};
struct pci_info {
    char legacy_bus_id[16];
    unsigned int domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
};
struct memory_info {
    unsigned long long total, free, used;
};

static struct gpu gpus[GPUS] = {{0}, {1}};

static void write_uuid(const struct gpu *gpu, char *text, unsigned int length)
{
    snprintf(text, length, "GPU-00000000-0000-0000-0000-00000000000%u", gpu->index);
}

int nvmlInit_v2(void) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { return code == SUCCESS ? "success" : "failed"; }

int nvmlDeviceGetCount_v2(unsigned int *count)
{
    *count = GPUS;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, device_handle *found)
{
    if (index >= GPUS) return INVALID_ARGUMENT;
    *found = &gpus[index];
    return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, device_handle *found)
{
    char own[64];
    for (unsigned int index = 0; index < GPUS; index++) {
        write_uuid(&gpus[index], own, sizeof own);
        if (strcmp(own, uuid) == 0) {
            *found = &gpus[index];
            return SUCCESS;
        }
    }
    return NOT_FOUND;
}

int nvmlDeviceGetUUID(device_handle gpu, char *uuid, unsigned int length)
{
    write_uuid(gpu, uuid, length);
    return SUCCESS;
}

int nvmlDeviceGetName(device_handle gpu, char *name, unsigned int length)
{
    (void)gpu;
    snprintf(name, length, "NVIDIA H200");
    return SUCCESS;
}

int nvmlDeviceGetMinorNumber(device_handle gpu, unsigned int *minor)
{
    *minor = gpu->index;
    return SUCCESS;
}

int nvmlDeviceGetPciInfo_v3(device_handle gpu, struct pci_info *info)
{
    memset(info, 0, sizeof *info);
    info->bus = 0xf0 + gpu->index;
    snprintf(info->bus_id, sizeof info->bus_id, "00000000:F%u:00.0", gpu->index);
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(device_handle gpu, struct memory_info *info)
{
    (void)gpu;
    *info = (struct memory_info){.total = 150754820096ULL, .free = 150754820096ULL};
    return SUCCESS;
}

int nvmlDeviceGetCudaComputeCapability(device_handle gpu, int *major, int *minor)
{
    (void)gpu;
    *major = 9;
    *minor = 0;
    return SUCCESS;
}

int nvmlDeviceGetMigMode(device_handle gpu, unsigned int *current, unsigned int *pending)
{
    (void)gpu;
    *current = *pending = 0;
    return SUCCESS;
}

int nvmlDeviceGetGpuInstanceProfileInfo(device_handle gpu, unsigned int profile, void *info)
{
    (void)gpu, (void)profile, (void)info;
    return NOT_SUPPORTED;
}

int nvmlEventSetCreate(void **set)
{
    *set = gpus;
    return SUCCESS;
}

int nvmlEventSetFree(void *set)
{
    (void)set;
    return SUCCESS;
}

int nvmlDeviceGetSupportedEventTypes(device_handle gpu, unsigned long long *types)
{
    (void)gpu;
    *types = 0;
    return SUCCESS;
}

int nvmlDeviceRegisterEvents(device_handle gpu, unsigned long long types, void *set)
{
    (void)gpu, (void)types, (void)set;
    return SUCCESS;
}

int nvmlEventSetWait_v2(void *set, void *data, unsigned int milliseconds)
{
    (void)set, (void)data;
    usleep(milliseconds * 1000);
    return TIMED_OUT;
}
