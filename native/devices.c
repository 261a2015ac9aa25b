/* Which region a device of the program belongs to. Programs narrow and reorder what they see (CUDA_VISIBLE_DEVICES,
 * HIP_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES), so ordinals are matched by UUID; by order only where no UUID is known. */
#include "aim.h"

#include <string.h>

enum { NONE = -1 };

static struct {
    int ready, visible;
    int index[AIM_DEVICES];
} maps[AIM_APIS];
static const struct aim_driver *in_use;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static int hex(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

/* Digits of a UUID in text: 32 for NVIDIA's (GPU-..., MIG-...), 16 for AMD's (GPU-1122334455667788). */
static int parse(const char *text, unsigned char digits[32])
{
    int count = 0;
    const char *at = strncmp(text, "GPU-", 4) == 0 || strncmp(text, "MIG-", 4) == 0 ? text + 4 : text;
    for (int i = 0; at[i] != 0 && at + i < text + AIM_NAME; i++) {
        if (at[i] == '-')
            continue;
        if (hex(at[i]) < 0 || count == 32)
            return 0;
        digits[count++] = (unsigned char)hex(at[i]);
    }
    return count;
}

/* CUDA returns 16 bytes; HIP returns 16 characters, the digits of the chip's unique id. */
static int matches(const char *text, const unsigned char uuid[16])
{
    unsigned char digits[32];
    int count = parse(text, digits);
    for (int i = 0; i < 16 && count == 32; i++)
        if (digits[2 * i] != uuid[i] >> 4 || digits[2 * i + 1] != (uuid[i] & 15))
            return 0;
    for (int i = 0; i < 16 && count == 16; i++)
        if (hex((char)uuid[i]) != digits[i])
            return 0;
    return count == 32 || count == 16;
}

/* Whether this driver's UUIDs are of the kind that the text is. */
static int is_comparable(const char *text, const unsigned char uuid[16])
{
    unsigned char digits[32];
    int count = parse(text, digits), characters = 0;
    while (characters < 16 && hex((char)uuid[characters]) >= 0)
        characters++;
    return count == 32 ? characters < 16 : count == 16 && characters == 16;
}

static int region_of(const unsigned char uuid[16], const int taken[AIM_DEVICES])
{
    for (int i = 0; i < aim_share_count(); i++) {
        const struct aim_share *share = aim_share_at(i);
        if (!taken[i] && share->region != NULL && matches(share->region->header.device, uuid))
            return i;
    }
    return NONE;
}

/* An ordinal whose UUID cannot be compared with that of the region in its place belongs to that region. */
static void build(const struct aim_driver *driver)
{
    int taken[AIM_DEVICES] = {0}, count = INSIDE(driver->device_count());
    int *index = maps[driver->api].index;
    if (count <= 0)
        return; /* the driver is not initialised: asked again */
    unsigned char uuid[AIM_DEVICES][16];
    for (int i = 0; i < AIM_DEVICES; i++) {
        memset(uuid[i], 0, sizeof uuid[i]);
        index[i] = i < count && INSIDE(driver->device_uuid(i, uuid[i])) == 0 ? region_of(uuid[i], taken) : NONE;
        if (index[i] != NONE)
            taken[index[i]] = 1;
    }
    for (int i = 0; i < count && i < aim_share_count() && i < AIM_DEVICES; i++) {
        const struct aim_region *region = aim_share_at(i)->region;
        if (index[i] == NONE && !taken[i] && (region == NULL || !is_comparable(region->header.device, uuid[i])))
            index[i] = i;
    }
    maps[driver->api].visible = count;
    store_release(&maps[driver->api].ready, 1);
}

static const struct aim_driver *loaded_driver(void)
{
    const struct aim_driver *driver = load_acquire(&in_use);
    if (driver == NULL) {
        driver = aim_driver_loaded(AIM_CUDA) ? &aim_cuda : aim_driver_loaded(AIM_HIP) ? &aim_hip : NULL;
        store_release(&in_use, driver);
    }
    return driver;
}

int aim_device_index(int device)
{
    const struct aim_driver *driver = loaded_driver();
    if (device < 0 || device >= AIM_DEVICES)
        return NONE;
    if (driver != NULL && !load_acquire(&maps[driver->api].ready)) {
        pthread_mutex_lock(&mutex);
        if (!load_acquire(&maps[driver->api].ready))
            build(driver);
        pthread_mutex_unlock(&mutex);
    }
    if (driver == NULL || !load_acquire(&maps[driver->api].ready))
        return device < aim_share_count() ? device : NONE;
    return maps[driver->api].index[device];
}

int aim_current_device(const struct aim_driver *driver)
{
    store_release(&in_use, driver);
    return load_acquire(&maps[driver->api].ready) && maps[driver->api].visible == 1 ? 0 : INSIDE(driver->device());
}

void aim_devices_after_fork(void) { pthread_mutex_init(&mutex, NULL); }
