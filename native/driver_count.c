/* What the driver holds for this process beside what was counted: its context, loaded kernels, stacks, streams, page tables.
 *
 * A process is charged a constant for that. Where it comes near its cap, it asks NVML for the driver's own figure, and is charged
 * the difference where that is more. For the moment of the question no allocation of this process is under way, so that the two
 * figures are of the same state; where a call does not return in time, only a larger charge is believed. Where NVML does not list
 * this process (another pid namespace), the constant and what the daemon measures remain. */
#include "driver_calls.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

enum { REST_NS = 50000000, QUIESCE_NS = 5000000, COST_SHARE = 20, LISTED = 512 };
#define MOST_BESIDE (2ull << 30) /* a larger difference is no context; the watchdog reports it */
#define NEAR (1ull << 30) /* more than a driver is expected to hold without its being charged */

static struct {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    unsigned under_way;
    int asking; /* no further call begins */
} calls = {.mutex = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
static int busy; /* a thread asks; the others do not wait for it */
static uint64_t next_ns[AIM_DEVICES];
static struct {
    int opened; /* 1: NVML knows it; -1: it does not */
    void *handle;
} devices[AIM_DEVICES];

void aim_call_begins(void)
{
    int cancel;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel); /* a cancelled thread would keep the mutex */
    pthread_mutex_lock(&calls.mutex);
    while (calls.asking)
        pthread_cond_wait(&calls.changed, &calls.mutex);
    calls.under_way++;
    pthread_mutex_unlock(&calls.mutex);
    pthread_setcancelstate(cancel, NULL);
}

void aim_call_ends(void)
{
    pthread_mutex_lock(&calls.mutex);
    if (--calls.under_way == 0 && calls.asking)
        pthread_cond_broadcast(&calls.changed);
    pthread_mutex_unlock(&calls.mutex);
}

static void stop_asking(void)
{
    pthread_mutex_lock(&calls.mutex);
    calls.asking = 0;
    pthread_cond_broadcast(&calls.changed);
    pthread_mutex_unlock(&calls.mutex);
}

void aim_driver_count_after_fork(void)
{
    pthread_mutex_init(&calls.mutex, NULL);
    pthread_cond_init(&calls.changed, NULL);
    calls.under_way = 0;
    calls.asking = 0;
    busy = 0;
    memset(next_ns, 0, sizeof next_ns);
    memset(devices, 0, sizeof devices);
}

struct listed { /* nvmlProcessInfo_t of the second and third version of the call */
    unsigned pid;
    unsigned long long used;
    unsigned instance, compute_instance;
};

#define NVML(name, parameters, arguments) CALL(AIM_NVML, name, parameters, arguments, 13)

static int open_device(const struct aim_driver *driver, int device)
{
    unsigned char uuid[16];
    if (devices[device].opened != 0)
        return devices[device].opened > 0;
    devices[device].opened = -1;
    if (driver->api != AIM_CUDA || !aim_load_library(AIM_NVML, "libnvidia-ml.so.1") || NVML("nvmlInit_v2", (void), ()) != 0 ||
        INSIDE(driver->device_uuid(device, uuid)) != 0)
        return 0;
    for (int mig = 0; mig < 2 && devices[device].opened < 0; mig++) {
        char text[48];
        int at = snprintf(text, sizeof text, "%s", mig ? "MIG-" : "GPU-");
        for (int i = 0; i < 16; i++)
            at += snprintf(text + at, sizeof text - (size_t)at, "%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", uuid[i]);
        if (NVML("nvmlDeviceGetHandleByUUID", (const char *, void **), (text, &devices[device].handle)) == 0)
            devices[device].opened = 1;
    }
    return devices[device].opened > 0;
}

/* The driver's figure for this process; 0: it does not list it. */
static int read_own(int device, uint64_t *bytes)
{
    static struct listed list[LISTED]; /* of the thread that has `busy` */
    unsigned count = LISTED;
    int code = NVML("nvmlDeviceGetComputeRunningProcesses_v3", (void *, unsigned *, struct listed *),
                    (devices[device].handle, &count, list));
    if (code == 13) {
        count = LISTED;
        code = NVML("nvmlDeviceGetComputeRunningProcesses_v2", (void *, unsigned *, struct listed *),
                    (devices[device].handle, &count, list));
    }
    for (unsigned i = 0; code == 0 && i < count && i < LISTED; i++)
        if (list[i].pid == aim_own_pid() && list[i].used != ~0ull) {
            *bytes = list[i].used;
            return 1;
        }
    return 0;
}

/* 1: no call of this process is under way, until `stop_asking`. */
static int quiesce(void)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += QUIESCE_NS;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    int code = 0;
    pthread_mutex_lock(&calls.mutex);
    calls.asking = 1;
    while (calls.under_way > 0 && code == 0)
        code = pthread_cond_timedwait(&calls.changed, &calls.mutex, &until);
    pthread_mutex_unlock(&calls.mutex);
    if (code != 0)
        stop_asking();
    return code == 0;
}

static void measure(const struct aim_driver *driver, int device, struct aim_share *share)
{
    uint64_t measured = 0;
    int still = quiesce();
    if (still)
        aim_pools_refresh(driver, device);
    uint64_t before = load(&share->held);
    int listed = INSIDE(read_own(device, &measured));
    uint64_t after = load(&share->held), counted = before > after ? before : after;
    /* A figure below what is surely held is that of another process with our number in its own namespace. */
    if (listed && (!still || measured >= counted)) {
        uint64_t beside = measured > counted ? measured - counted : 0;
        if (beside <= MOST_BESIDE)
            aim_charge_beside(share, beside, still && before == after);
    }
    if (still)
        stop_asking();
}

static int is_near(const struct aim_share *share, uint64_t bytes)
{
    uint64_t cap, used;
    if (!aim_share_cap(share, &cap, &used))
        return 0;
    return used > cap || bytes > cap - used || cap - used - bytes < (cap / 8 > NEAR ? cap / 8 : NEAR);
}

/* It may hold more than was charged: it is asked before the next allocation. */
void aim_driver_grew(int device)
{
    if (load(&next_ns[device]) != UINT64_MAX)
        store(&next_ns[device], 0);
}

/* Before an allocation: what the driver holds is charged, if this process is near its cap and did not ask a moment ago. Not
 * between `aim_call_begins` and `aim_call_ends`. */
void aim_driver_count(const struct aim_driver *driver, int device, uint64_t bytes)
{
    struct aim_share *share = aim_share_of(device);
    if (share == NULL || share->broken || device < 0 || device >= AIM_DEVICES || load(&share->tenant->context_bytes) == 0 ||
        !is_near(share, bytes) || aim_now() < load(&next_ns[device]) || __atomic_exchange_n(&busy, 1, __ATOMIC_ACQUIRE))
        return;
    uint64_t begun = aim_now();
    int cancel;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
    if (begun >= load(&next_ns[device])) {
        if (INSIDE(open_device(driver, device)))
            measure(driver, device, share);
        uint64_t ended = aim_now(), rest = (ended - begun) * COST_SHARE;
        store(&next_ns[device], devices[device].opened < 0 ? UINT64_MAX : ended + (rest > REST_NS ? rest : REST_NS));
    }
    store_release(&busy, 0);
    pthread_setcancelstate(cancel, NULL);
}
