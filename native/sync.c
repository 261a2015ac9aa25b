/* What is learned of the end of work: a thread that waits for the device or asks whether it is done, and events. It tells which
 * tenants have work (activity.c), ends batches (inflight.c), and shows what pools hold now. */
#include "gate.h"

static struct aim_process *slot_of(const struct aim_driver *driver, int *device, struct aim_share **share)
{
    *device = aim_current_device(driver);
    *share = aim_share_of(*device);
    return *share == NULL || (*share)->broken ? NULL : load_acquire(&(*share)->slot);
}

static int is_watched(const struct aim_share *share) { return load(&share->tenant->rank) != 0 || aim_window_is_shared(); }

static void stop_waiting(struct aim_process *slot)
{
    uint64_t count = load(&slot->waiting);
    while (count != 0 && !__atomic_compare_exchange_n(&slot->waiting, &count, count - 1, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        ;
}

void aim_event_recorded(const struct aim_driver *driver, const void *event, const void *stream)
{
    struct aim_share *share;
    int device;
    if (slot_of(driver, &device, &share) != NULL && is_watched(share))
        aim_stream_event_recorded(driver, device, event, stream);
}

void aim_stream_waits_for(const struct aim_driver *driver, const void *stream, const void *event)
{
    struct aim_share *share;
    int device;
    if (slot_of(driver, &device, &share) != NULL && is_watched(share))
        aim_stream_waits(driver, device, stream, event);
}

/* A thread begins to wait for the device, or asks whether it is done. */
uint64_t aim_sync_enter(const struct aim_driver *driver, int waits)
{
    struct aim_share *share;
    int device;
    struct aim_process *slot = slot_of(driver, &device, &share);
    if (slot == NULL)
        return 0;
    store(&slot->asked_ns, aim_now());
    if (waits)
        add(&slot->waiting, 1);
    return is_watched(share) ? aim_stream_clock() : 0;
}

static void finished(const struct aim_driver *driver, int device, struct aim_share *share, struct aim_process *slot)
{
    if (is_watched(share))
        store(&slot->done_ns, aim_now());
    aim_inflight_collect(driver, device, share);
    aim_pools_refresh(driver, -1);
}

void aim_event_done(const struct aim_driver *driver, const void *event, int waited, int done)
{
    struct aim_share *share;
    int device;
    struct aim_process *slot = slot_of(driver, &device, &share);
    if (slot == NULL)
        return;
    if (waited)
        stop_waiting(slot);
    if (!done)
        return;
    uint64_t before = load(&slot->done);
    if (is_watched(share))
        aim_stream_event_finished(device, event, slot);
    if (load(&slot->done) != before)
        finished(driver, device, share, slot);
    else
        aim_pools_refresh(driver, -1);
}

void aim_sync_leave(const struct aim_driver *driver, const void *stream, enum aim_extent extent, uint64_t seen, int done)
{
    struct aim_share *share;
    int device;
    struct aim_process *slot = slot_of(driver, &device, &share);
    if (slot == NULL)
        return;
    stop_waiting(slot);
    if (!done)
        return;
    if (is_watched(share))
        aim_stream_finished(driver, device, stream, extent == AIM_WHOLE, seen, slot);
    finished(driver, device, share, slot);
}
