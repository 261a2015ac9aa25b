/* Two GPUs as far as NVIDIA's device plugin asks NVML about them. Loaded as libnvidia-ml.so.1.
 *
 * STANDIN_MIG gives the MIG instances of each: "3g.71gb,1g.18gb;-" is two on the first and MIG mode without any on the second;
 * nothing for a GPU is MIG mode off. Every GPU instance has one compute instance. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TIMED_OUT = 10 };
enum { GPUS = 2, INSTANCES = 7, NONE = -1 };

typedef struct device *device_handle; /* a GPU, a MIG device, and its GPU and compute instance, which are one here */
struct device {
    unsigned int gpu;
    int instance; /* NONE: the GPU itself */
    const struct profile *profile;
};
struct pci_info {
    char legacy_bus_id[16];
    unsigned int domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
};
struct memory_info {
    unsigned long long total, free, used;
};
struct attributes {
    unsigned int multiprocessors, copy_engines, decoders, encoders, jpegs, ofas, gpu_slices, compute_slices;
    unsigned long long memory_mib;
};
struct gpu_profile_info {
    unsigned int id, is_p2p, slices, instances, multiprocessors, copy_engines, decoders, encoders, jpegs, ofas;
    unsigned long long memory_mib;
};
struct compute_profile_info {
    unsigned int id, slices, instances, multiprocessors, copy_engines, decoders, encoders, jpegs, ofas;
};
struct gpu_instance_info {
    device_handle gpu;
    unsigned int id, profile, start, size;
};
struct compute_instance_info {
    device_handle gpu, gpu_instance;
    unsigned int id, profile, start, size;
};

/* Profiles of an H200: NVML's numbers of the GPU instance profile and of the compute instance profile with all its slices. */
static const struct profile {
    const char *name;
    unsigned int gpu_profile, compute_profile, slices;
    unsigned long long memory_mib;
} profiles[] = {
    {"1g.18gb", 0, 0, 1, 16384}, {"2g.35gb", 1, 1, 2, 33280},  {"3g.71gb", 2, 2, 3, 71424},
    {"4g.71gb", 3, 3, 4, 71424}, {"7g.141gb", 4, 4, 7, 143360}, {"1g.18gb+me", 7, 0, 1, 16384},
    {"1g.35gb", 9, 0, 1, 33280},
};
enum { PROFILES = sizeof profiles / sizeof profiles[0] };

static struct device gpus[GPUS] = {{0, NONE, NULL}, {1, NONE, NULL}};
static struct device instances[GPUS][INSTANCES];
static int counts[GPUS], mig_mode[GPUS];

static const struct profile *find_profile(const char *name, size_t length)
{
    for (int index = 0; index < PROFILES; index++)
        if (strlen(profiles[index].name) == length && strncmp(profiles[index].name, name, length) == 0)
            return &profiles[index];
    return NULL;
}

static void read_layout(void)
{
    const char *text = getenv("STANDIN_MIG");
    memset(counts, 0, sizeof counts);
    for (unsigned int gpu = 0; text != NULL && gpu < GPUS; gpu++) {
        const char *end = text + strcspn(text, ";");
        mig_mode[gpu] = end > text;
        while (text < end) {
            size_t length = strcspn(text, ",;");
            const struct profile *profile = find_profile(text, length);
            if (profile != NULL && counts[gpu] < INSTANCES) {
                instances[gpu][counts[gpu]] = (struct device){gpu, counts[gpu], profile};
                counts[gpu]++;
            }
            text += length + (text[length] == ',');
        }
        text = *end == ';' ? end + 1 : NULL;
    }
}

static void write_uuid(const struct device *device, char *text, unsigned int length)
{
    if (device->instance == NONE)
        snprintf(text, length, "GPU-00000000-0000-0000-0000-00000000000%u", device->gpu);
    else
        snprintf(text, length, "MIG-00000000-0000-0000-000%u-00000000000%d", device->gpu, device->instance);
}

int nvmlInit_v2(void)
{
    read_layout();
    return SUCCESS;
}

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

static int is_named(device_handle device, const char *uuid)
{
    char own[64];
    write_uuid(device, own, sizeof own);
    return strcmp(own, uuid) == 0;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, device_handle *found)
{
    for (unsigned int gpu = 0; gpu < GPUS; gpu++) {
        *found = &gpus[gpu];
        if (is_named(*found, uuid)) return SUCCESS;
        for (int instance = 0; instance < counts[gpu]; instance++) {
            *found = &instances[gpu][instance];
            if (is_named(*found, uuid)) return SUCCESS;
        }
    }
    return NOT_FOUND;
}

int nvmlDeviceGetUUID(device_handle device, char *uuid, unsigned int length)
{
    write_uuid(device, uuid, length);
    return SUCCESS;
}

int nvmlDeviceGetName(device_handle device, char *name, unsigned int length)
{
    if (device->instance == NONE)
        snprintf(name, length, "NVIDIA H200");
    else
        snprintf(name, length, "NVIDIA H200 MIG %s", device->profile->name);
    return SUCCESS;
}

int nvmlDeviceGetMinorNumber(device_handle device, unsigned int *minor)
{
    if (device->instance != NONE) return NOT_SUPPORTED;
    *minor = device->gpu;
    return SUCCESS;
}

int nvmlDeviceGetPciInfo_v3(device_handle device, struct pci_info *info)
{
    memset(info, 0, sizeof *info);
    info->bus = 0xf0 + device->gpu;
    snprintf(info->bus_id, sizeof info->bus_id, "00000000:F%u:00.0", device->gpu);
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(device_handle device, struct memory_info *info)
{
    unsigned long long total = device->instance == NONE ? 150754820096ULL : device->profile->memory_mib << 20;
    *info = (struct memory_info){.total = total, .free = total};
    return SUCCESS;
}

int nvmlDeviceGetCudaComputeCapability(device_handle device, int *major, int *minor)
{
    (void)device;
    *major = 9;
    *minor = 0;
    return SUCCESS;
}

int nvmlDeviceGetMigMode(device_handle device, unsigned int *current, unsigned int *pending)
{
    *current = *pending = mig_mode[device->gpu];
    return SUCCESS;
}

int nvmlDeviceIsMigDeviceHandle(device_handle device, unsigned int *is_mig)
{
    *is_mig = device->instance != NONE;
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(device_handle device, unsigned int *count)
{
    (void)device;
    *count = INSTANCES;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(device_handle device, unsigned int index, device_handle *found)
{
    if (index >= (unsigned int)counts[device->gpu]) return NOT_FOUND;
    *found = &instances[device->gpu][index];
    return SUCCESS;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device_handle mig, device_handle *found)
{
    *found = &gpus[mig->gpu];
    return SUCCESS;
}

int nvmlDeviceGetAttributes_v2(device_handle mig, struct attributes *found)
{
    if (mig->instance == NONE) return NOT_SUPPORTED;
    *found = (struct attributes){.gpu_slices = mig->profile->slices, .compute_slices = mig->profile->slices};
    found->memory_mib = mig->profile->memory_mib;
    found->jpegs = strstr(mig->profile->name, "+me") != NULL;
    return SUCCESS;
}

int nvmlDeviceGetGpuInstanceId(device_handle mig, unsigned int *id)
{
    *id = mig->instance + 1;
    return SUCCESS;
}

int nvmlDeviceGetComputeInstanceId(device_handle mig, unsigned int *id)
{
    (void)mig;
    *id = 0;
    return SUCCESS;
}

int nvmlDeviceGetGpuInstanceById(device_handle device, unsigned int id, device_handle *found)
{
    if (id < 1 || id > (unsigned int)counts[device->gpu]) return NOT_FOUND;
    *found = &instances[device->gpu][id - 1];
    return SUCCESS;
}

int nvmlGpuInstanceGetComputeInstanceById(device_handle instance, unsigned int id, device_handle *found)
{
    *found = instance;
    return id == 0 ? SUCCESS : NOT_FOUND;
}

int nvmlGpuInstanceGetInfo(device_handle instance, struct gpu_instance_info *info)
{
    const struct profile *own = instance->profile;
    *info = (struct gpu_instance_info){&gpus[instance->gpu], instance->instance + 1, own->gpu_profile, 0, own->slices};
    return SUCCESS;
}

int nvmlComputeInstanceGetInfo_v2(device_handle instance, struct compute_instance_info *info)
{
    const struct profile *own = instance->profile;
    *info = (struct compute_instance_info){&gpus[instance->gpu], instance, 0, own->compute_profile, 0, own->slices};
    return SUCCESS;
}

int nvmlDeviceGetGpuInstanceProfileInfo(device_handle device, unsigned int number, struct gpu_profile_info *info)
{
    (void)device;
    for (int index = 0; index < PROFILES; index++)
        if (profiles[index].gpu_profile == number) {
            *info = (struct gpu_profile_info){.id = number, .slices = profiles[index].slices};
            info->memory_mib = profiles[index].memory_mib;
            return SUCCESS;
        }
    return NOT_SUPPORTED;
}

int nvmlGpuInstanceGetComputeInstanceProfileInfo(
    device_handle instance, unsigned int number, unsigned int engines, struct compute_profile_info *info)
{
    if (number != instance->profile->compute_profile || engines != 0) return NOT_SUPPORTED;
    *info = (struct compute_profile_info){.id = number, .slices = instance->profile->slices};
    return SUCCESS;
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

int nvmlDeviceGetSupportedEventTypes(device_handle device, unsigned long long *types)
{
    (void)device;
    *types = 0;
    return SUCCESS;
}

int nvmlDeviceRegisterEvents(device_handle device, unsigned long long types, void *set)
{
    (void)device, (void)types, (void)set;
    return SUCCESS;
}

int nvmlEventSetWait_v2(void *set, void *data, unsigned int milliseconds)
{
    (void)set, (void)data;
    usleep(milliseconds * 1000);
    return TIMED_OUT;
}
