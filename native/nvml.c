/* NVML: a tenant's nvidia-smi shows its cap. Utilisation and process lists stay the card's own. */
#include "driver_calls.h"

#include <string.h>

struct info {
    unsigned long long total, free, used;
};
struct info_v2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};

/* Which region an NVML handle belongs to: the one with its UUID, or the only one. -1: none. */
static int granted(void *device)
{
    char uuid[96] = "";
    if (CALL(AIM_NVML, "nvmlDeviceGetUUID", (void *, char *, unsigned), (device, uuid, sizeof uuid), 1) != 0)
        uuid[0] = 0;
    for (int i = 0; i < aim_share_count(); i++) {
        const struct aim_share *share = aim_share_at(i);
        const char *name = share->region == NULL ? "" : share->region->header.device;
        if (name[0] == 0 || uuid[0] == 0 ? aim_share_count() == 1 : strncmp(name, uuid, AIM_NAME) == 0)
            return i;
    }
    return -1;
}

static int shown(void *device, uint64_t real_total, uint64_t *total, uint64_t *used)
{
    int on = granted(device);
    if (on < 0 || !aim_share_cap(aim_share_at(on), total, used))
        return 0;
    if (*total > real_total)
        *total = real_total;
    if (*used > *total)
        *used = *total;
    return 1;
}

AIM_EXPORT int nvmlDeviceGetMemoryInfo(void *device, struct info *info);
AIM_EXPORT int nvmlDeviceGetMemoryInfo(void *device, struct info *info)
{
    int (*real)(void *, struct info *) = (int (*)(void *, struct info *))aim_real(F_nvmlDeviceGetMemoryInfo);
    uint64_t total, used;
    int code = real == NULL ? 13 : INSIDE(real(device, info)); /* 13: NVML_ERROR_FUNCTION_NOT_FOUND */
    if (code == 0 && aim_depth == 0 && aim_enabled() && shown(device, info->total, &total, &used))
        *info = (struct info){.total = total, .used = used, .free = total - used};
    return code;
}

AIM_EXPORT int nvmlDeviceGetMemoryInfo_v2(void *device, struct info_v2 *info);
AIM_EXPORT int nvmlDeviceGetMemoryInfo_v2(void *device, struct info_v2 *info)
{
    int (*real)(void *, struct info_v2 *) = (int (*)(void *, struct info_v2 *))aim_real(F_nvmlDeviceGetMemoryInfo_v2);
    uint64_t total, used;
    int code = real == NULL ? 13 : INSIDE(real(device, info));
    if (code == 0 && aim_depth == 0 && aim_enabled() && shown(device, info->total, &total, &used)) {
        info->total = total;
        info->used = used;
        info->free = total - used;
        info->reserved = 0;
    }
    return code;
}
