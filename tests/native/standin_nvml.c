/* libnvidia-ml.so.1, as far as the library looks at it: the driver's own figure for every process. */
#include "standin.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static struct state *shared;

struct listed {
    unsigned pid;
    unsigned long long used;
    unsigned instance, compute_instance;
};

API int nvmlInit_v2(void)
{
    const char *path = getenv("STANDIN_STATE");
    int file = path == NULL ? -1 : open(path, O_RDWR | O_CLOEXEC);
    void *at = file < 0 ? MAP_FAILED : mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (file >= 0)
        close(file);
    if (at == MAP_FAILED)
        return 999;
    return shared = at, OK;
}

API int nvmlDeviceGetHandleByUUID(const char *uuid, void **device)
{
    return strcmp(uuid, "GPU-a0a0a0a0-a0a0-a0a0-a0a0-a0a0a0a0a0a0") == 0 ? (*device = (void *)1, OK) : 6;
}

API int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { return index == 0 ? (*device = (void *)1, OK) : INVALID; }

API int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *info)
{
    (void)device;
    info[0] = shared->device_bytes;
    info[2] = __atomic_load_n(&shared->used, __ATOMIC_SEQ_CST);
    return info[1] = info[0] - info[2], OK;
}

API int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, struct listed *list)
{
    unsigned found = 0;
    (void)device;
    __atomic_add_fetch(&shared->counts, 1, __ATOMIC_SEQ_CST);
    for (unsigned i = 0; i < MOST_PROCESSES && found < *count; i++) {
        uint64_t pid = __atomic_load_n(&shared->processes[i].pid, __ATOMIC_SEQ_CST);
        if (pid == 0)
            continue;
        list[found] = (struct listed){.pid = (unsigned)(pid + shared->pid_offset)};
        list[found++].used = __atomic_load_n(&shared->processes[i].used, __ATOMIC_SEQ_CST);
    }
    return *count = found, OK;
}
