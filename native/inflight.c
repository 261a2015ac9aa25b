/* Bounded work in flight. Launches of one stream are counted in batches between two events. Two batches of small kernels may
 * be in flight at once, if both together stay below the bound; a kernel as long as the bound flies alone. */
#include "gate.h"

#include <string.h>

enum { RING = 4, MOST = 256, STALE_NS = 300000, WINDOW_NS = 100000000, LEAST_PPM = 1000 };

struct batch {
    void *start, *end, *stream;
    uint64_t count, last_ns, ends_ns;
    int unsound; /* idle time lies between its events */
};
static struct inflight {
    struct batch ring[RING];
    unsigned first, closed; /* closed ones from `first`, then the open one */
    int open;
    uint64_t context;
    uint64_t launch_ns; /* device time of one launch, smoothed */
    uint64_t per_batch;
    uint64_t free_at;
    uint64_t unbound_until;
} inflights[AIM_DEVICES];

static struct batch *at(struct inflight *inflight, unsigned i) { return &inflight->ring[(inflight->first + i) % RING]; }

int aim_inflight_any(int device) { return inflights[device].closed > 0 || inflights[device].open; }
uint64_t aim_inflight_busy_until(int device) { return inflights[device].free_at; }
int aim_inflight_is_bound(int device, uint64_t now) { return now >= inflights[device].unbound_until; }
uint64_t aim_inflight_end(int device, const struct aim_share *share, uint64_t now, int more)
{
    const struct inflight *inflight = &inflights[device];
    uint64_t from = inflight->free_at > now ? inflight->free_at : now, each = inflight->launch_ns, count = (uint64_t)more;
    if (inflight->open)
        count += inflight->ring[(inflight->first + inflight->closed) % RING].count;
    else if (inflight->closed > 0 && each == 0)
        count++; /* how long the first one takes is not known yet */
    return from + count * (each != 0 ? each : load(&share->region->header.batch_ns));
}
void aim_inflight_unbound(int device, uint64_t until) { inflights[device].unbound_until = until; }
void aim_inflight_reset(int device) { memset(&inflights[device], 0, sizeof inflights[device]); }

static void charge_time(struct aim_share *share, uint64_t spent, uint64_t now)
{
    struct aim_tenant *tenant = share->tenant;
    uint32_t ppm = load(&tenant->compute_ppm);
    add(&tenant->gpu_ns, spent);
    add(&tenant->batches, 1);
    if (ppm == 0 || ppm >= 1000000)
        return;
    uint64_t cost = spent * 1000000 / (ppm < LEAST_PPM ? LEAST_PPM : ppm), old = load(&tenant->paid_until_ns), from, paid;
    do {
        from = now > WINDOW_NS && old < now - WINDOW_NS ? now - WINDOW_NS : old; /* unused time is kept for a window */
        paid = from + cost;
    } while (!__atomic_compare_exchange_n(&tenant->paid_until_ns, &old, paid, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
}

uint64_t aim_paid_at(const struct aim_share *share, uint64_t now)
{
    uint32_t ppm = load(&share->tenant->compute_ppm);
    if (ppm == 0 || ppm >= 1000000)
        return now;
    uint64_t paid = load(&share->tenant->paid_until_ns);
    return paid > now && paid - now < 10000000000u ? paid : now;
}

static void learn(struct inflight *inflight, struct aim_share *share, const struct batch *batch, uint64_t spent)
{
    struct aim_header *header = &share->region->header;
    uint64_t one = spent / (batch->count == 0 ? 1 : batch->count), old = inflight->launch_ns;
    if (old == 0)
        inflight->launch_ns = one;
    else if (one > old + old / 2)
        inflight->launch_ns = old + old / 8 + 1; /* others may have run meanwhile: believe it slowly */
    else
        inflight->launch_ns = (3 * old + one) / 4;
    uint64_t target = load(&header->batch_ns), each = inflight->launch_ns == 0 ? 1 : inflight->launch_ns;
    uint64_t fit = target / 2 / each; /* two of them fit */
    inflight->per_batch = fit < 1 ? 1 : fit > MOST ? MOST : fit;
    uint64_t gap = load(&header->gap_ns);
    store(&header->gap_ns, gap == 0 ? spent : (7 * gap + spent) / 8);
}

/* Takes finished batches out. */
static void collect(const struct aim_driver *driver, struct inflight *inflight, struct aim_share *share, uint64_t now)
{
    while (inflight->closed > 0) {
        struct batch *batch = at(inflight, 0);
        float milliseconds = 0;
        if (RELAXED(driver, driver->event_query(batch->end)) == 600) /* not ready, in both interfaces */
            return;
        uint64_t spent = inflight->launch_ns * batch->count;
        if (!batch->unsound && RELAXED(driver, driver->event_elapsed(&milliseconds, batch->start, batch->end)) == 0 &&
            milliseconds > 0) {
            spent = (uint64_t)((double)milliseconds * 1e6);
            learn(inflight, share, batch, spent);
        }
        charge_time(share, spent, now);
        aim_yield_charge(share, spent, now);
        inflight->first = (inflight->first + 1) % RING;
        inflight->closed--;
        if (inflight->closed == 0)
            inflight->free_at = now;
    }
}

static void close_batch(const struct aim_driver *driver, struct inflight *inflight, int unsound)
{
    struct batch *batch = at(inflight, inflight->closed);
    uint64_t now = aim_now(), from = inflight->free_at > now ? inflight->free_at : now;
    RELAXED(driver, driver->event_record(batch->end, batch->stream));
    batch->unsound = unsound;
    batch->ends_ns = from + inflight->launch_ns * batch->count;
    inflight->free_at = batch->ends_ns;
    inflight->open = 0;
    inflight->closed++;
}

static int have_events(const struct aim_driver *driver, struct inflight *inflight)
{
    uint64_t context = driver->context();
    if (inflight->ring[0].start != NULL && inflight->context == context)
        return 1;
    memset(inflight, 0, sizeof *inflight); /* another context: what flies there is not ours to ask about */
    inflight->context = context;
    inflight->per_batch = 1;
    for (int i = 0; i < RING; i++)
        if (RELAXED(driver, driver->event_create(&inflight->ring[i].start)) != 0 ||
            RELAXED(driver, driver->event_create(&inflight->ring[i].end)) != 0) {
            inflight->ring[0].start = NULL;
            return 0;
        }
    return 1;
}

uint64_t aim_room_at(const struct aim_driver *driver, int device, struct aim_share *share, void *stream, uint64_t now)
{
    struct inflight *inflight = &inflights[device];
    if (now < inflight->unbound_until || !have_events(driver, inflight))
        return now;
    if (inflight->open) {
        struct batch *batch = at(inflight, inflight->closed);
        int stale = now > batch->last_ns + STALE_NS;
        if (batch->stream == stream && !stale)
            return now;
        close_batch(driver, inflight, stale);
    }
    collect(driver, inflight, share, now);
    if (inflight->closed == 0)
        return now;
    uint64_t more = inflight->launch_ns * inflight->per_batch, left = inflight->free_at > now ? inflight->free_at - now : 0;
    if (inflight->closed < RING - 1 && inflight->launch_ns != 0 && left + more <= load(&share->region->header.batch_ns))
        return now;
    /* Small ones: when both fit. Long ones: shortly before the end is due, then often. */
    uint64_t soon = now + 20000, bound = load(&share->region->header.batch_ns), lead = load(&share->region->header.lead_ns);
    if (more < bound && bound - more > lead)
        lead = bound - more;
    return inflight->free_at > soon + lead ? inflight->free_at - lead : soon;
}

void aim_inflight_opened(const struct aim_driver *driver, int device, void *stream)
{
    struct inflight *inflight = &inflights[device];
    if (inflight->open || inflight->ring[0].start == NULL || inflight->closed >= RING - 1)
        return;
    struct batch *batch = at(inflight, inflight->closed);
    batch->stream = stream;
    batch->count = 0;
    inflight->open = RELAXED(driver, driver->event_record(batch->start, stream)) == 0;
}

void aim_inflight_launched(const struct aim_driver *driver, int device, struct aim_share *share)
{
    struct inflight *inflight = &inflights[device];
    (void)share;
    if (!inflight->open)
        return;
    struct batch *batch = at(inflight, inflight->closed);
    batch->last_ns = aim_now();
    if (++batch->count >= inflight->per_batch)
        close_batch(driver, inflight, 0);
}
