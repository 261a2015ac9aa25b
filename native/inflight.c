/* Bounded work in flight. Launches of one stream are counted in batches between two events. A batch goes through these states:
 *
 *     open --(full, stale, another stream, a synchronisation)--> closed --(its end event is done)--> finished
 *      |                                                            |
 *      +--(its stream is captured, its context ends)--> abandoned --+   (counted as finished when its turn comes)
 *
 * One batch is open, up to three are closed. Launches of known length may be in flight together as long as their expected length
 * stays below the bound, and they are no more than their lengths can be trusted (lengths.c). A launch that is longer, or whose
 * length is not known, is in flight alone. What takes longer than was expected counts as unknown: nothing is added to it. */
#include "gate.h"

#include <string.h>

enum { RING = 4, PAIRS = 16, KEYS = 8, DOUBLINGS = 3, QUEUED = 64 };
enum { STALE_NS = 300000, SOON_NS = 20000, LATE_NS = 50000, SHORT_NS = 2000000, POLL_NS = 1000000 };

struct pair {
    void *start, *end;
    uint64_t context;
    int made, busy;
};
struct batch {
    struct pair *events;
    void *stream;
    uint64_t serial, opened_ns, last_ns, call_ns, expected_ns, paid_ns, due_ns;
    struct aim_key keys[KEYS];
    unsigned key_count, count, pending; /* pending: launches whose driver call has not returned */
    unsigned most;                      /* launches that may be in flight together with these */
    unsigned limit;                     /* launches in it */
    int alone, unknown, unsound;        /* unsound: idle time lies between its events */
    int abandoned;                      /* its events must not be used any more */
    int beside;                         /* a higher tenant worked meanwhile */
    int varies;                         /* it may end long before it is expected to */
    struct aim_admission admission;
};
static struct inflight {
    pthread_mutex_t mutex;
    struct batch ring[RING];
    struct pair pairs[PAIRS];
    unsigned first, closed; /* closed batches from `first`, then the open one */
    int open;
    uint64_t serials;
    uint64_t free_at;     /* when what is in flight is expected to end */
    uint64_t progress_ns; /* when something last finished, or a launch was admitted at the bound */
    unsigned stalls; /* launches admitted at the bound since something last finished */
    int any;         /* readable without the mutex: something is in flight */
    int held;        /* readable without the mutex: a thread has it */
} inflights[AIM_DEVICES] = {[0 ... AIM_DEVICES - 1] = {.mutex = PTHREAD_MUTEX_INITIALIZER}};

static struct batch *at(struct inflight *inflight, unsigned i) { return &inflight->ring[(inflight->first + i) % RING]; }
static struct batch *open_batch(struct inflight *inflight) { return inflight->open ? at(inflight, inflight->closed) : NULL; }

void aim_inflight_lock(int device)
{
    pthread_mutex_lock(&inflights[device].mutex);
    store(&inflights[device].held, 1);
}
void aim_inflight_unlock(int device)
{
    store(&inflights[device].any, inflights[device].closed > 0 || inflights[device].open);
    store(&inflights[device].held, 0);
    pthread_mutex_unlock(&inflights[device].mutex);
}
int aim_inflight_seen(int device) { return load(&inflights[device].any); }
int aim_inflight_any(int device) { return inflights[device].closed > 0 || inflights[device].open; }

void aim_inflight_reset(int device)
{
    memset(&inflights[device], 0, sizeof inflights[device]);
    pthread_mutex_init(&inflights[device].mutex, NULL);
}

void aim_inflight_expect(struct aim_launch *launch)
{
    struct aim_expected found = aim_length_of(&launch->key);
    launch->expected_ns = found.ns;
    launch->most = found.most;
    launch->known = found.known;
    launch->varies = found.varies;
}

static uint64_t batch_target(const struct aim_launch *launch) { return load(&launch->share->region->header.batch_ns); }

uint64_t aim_inflight_end(const struct aim_launch *launch, uint64_t now, int with_launch)
{
    struct inflight *inflight = &inflights[launch->device];
    uint64_t end = inflight->free_at > now ? inflight->free_at : now;
    const struct batch *open = open_batch(inflight);
    if (open != NULL)
        end += open->unknown ? batch_target(launch) : open->expected_ns;
    return end + (with_launch ? (launch->known ? launch->expected_ns : batch_target(launch)) : 0);
}

static struct pair *take_pair(const struct aim_driver *driver, struct inflight *inflight)
{
    uint64_t context = driver->context();
    struct pair *pair = NULL;
    for (unsigned i = 0; i < PAIRS; i++) {
        struct pair *one = &inflight->pairs[i];
        if (one->made && !one->busy && one->context == context) {
            one->busy = 1;
            return one;
        }
        if (!one->busy && (pair == NULL || (pair->made && !one->made)))
            pair = one;
    }
    if (pair == NULL)
        return NULL;
    if (pair->made) { /* of another context */
        RELAXED(driver, driver->event_destroy(pair->start));
        RELAXED(driver, driver->event_destroy(pair->end));
    }
    *pair = (struct pair){.context = context};
    if (RELAXED(driver, driver->event_create(&pair->start)) != 0)
        return NULL;
    if (RELAXED(driver, driver->event_create(&pair->end)) != 0) {
        RELAXED(driver, driver->event_destroy(pair->start));
        return NULL;
    }
    pair->made = pair->busy = 1;
    return pair;
}

/* What the batch took, as far as it is known. */
static void learn(struct aim_share *share, const struct batch *batch, uint64_t spent)
{
    struct aim_header *header = &share->region->header;
    uint64_t gap = load(&header->gap_ns), longest = load(&share->tenant->longest_launch_ns);
    struct aim_measured took = {.ns = spent, .expected_ns = batch->expected_ns, .call_ns = batch->call_ns};
    took.launches = batch->count;
    took.keys = batch->key_count;
    took.beside = batch->beside;
    for (unsigned i = 0; i < batch->key_count; i++)
        aim_length_measured(&batch->keys[i], &took);
    if (batch->beside)
        return;
    store(&header->gap_ns, gap == 0 ? spent : (7 * gap + spent) / 8);
    uint64_t length = batch->count == 1 ? aim_length_of(&batch->keys[0]).ns : 0;
    if (length > longest)
        store(&share->tenant->longest_launch_ns, length);
    else if (aim_lookahead_is_long(share, longest))
        store(&share->tenant->longest_launch_ns, longest - longest / 256);
}

static void finish_batch(const struct aim_driver *driver, struct inflight *inflight, struct aim_share *share,
                         struct batch *batch, uint64_t now)
{
    float milliseconds = 0;
    uint64_t spent = batch->expected_ns, ended = now;
    if (!batch->abandoned && !batch->unsound && batch->count > 0 &&
        RELAXED(driver, driver->event_elapsed(&milliseconds, batch->events->start, batch->events->end)) == 0 &&
        milliseconds > 0) {
        spent = (uint64_t)((double)milliseconds * 1e6);
        learn(share, batch, spent);
        ended = batch->opened_ns + spent < now ? batch->opened_ns + spent : now;
    }
    if (batch->beside && batch->expected_ns != 0 && spent > batch->expected_ns)
        spent = batch->expected_ns;
    aim_compute_correct(share, batch->paid_ns, spent, now);
    aim_lookahead_finished(share, &batch->admission, ended);
    if (batch->events != NULL)
        batch->events->busy = 0;
    inflight->progress_ns = now;
    inflight->stalls = 0;
}

/* Takes finished batches out. */
static void collect(const struct aim_driver *driver, struct inflight *inflight, struct aim_share *share, uint64_t now)
{
    while (inflight->closed > 0) {
        struct batch *batch = at(inflight, 0);
        if (!batch->abandoned && RELAXED(driver, driver->event_query(batch->events->end)) == 600) /* not ready */
            return;
        finish_batch(driver, inflight, share, batch, now);
        inflight->first = (inflight->first + 1) % RING;
        inflight->closed--;
        if (inflight->closed == 0)
            inflight->free_at = now;
    }
}

/* Ends the open batch. A stream that is being captured takes no event of ours: its batch is given up. */
static void close_batch(const struct aim_driver *driver, struct inflight *inflight, uint64_t target, int unsound, uint64_t now)
{
    struct batch *batch = open_batch(inflight);
    uint64_t from = inflight->free_at > now ? inflight->free_at : now, graph = 0;
    int entered = driver->context_enter(batch->events->context);
    if (batch->pending > 0 || driver->capturing(batch->stream, &graph) ||
        RELAXED(driver, driver->event_record(batch->events->end, batch->stream)) != 0)
        batch->abandoned = 1;
    if (entered)
        driver->context_leave();
    batch->unsound = unsound;
    inflight->free_at = batch->due_ns = from + (batch->unknown ? target : batch->expected_ns);
    inflight->open = 0;
    inflight->closed++;
}

static int has_key(const struct batch *batch, const struct aim_key *key)
{
    for (unsigned i = 0; i < batch->key_count; i++)
        if (batch->keys[i].exact == key->exact)
            return 1;
    return 0;
}

static unsigned batches(const struct inflight *inflight) { return inflight->closed + (inflight->open ? 1u : 0u); }

/* Whether the launch and all that is in flight are few enough, in case each takes as long as it never did before. */
static int are_few(struct inflight *inflight, const struct aim_launch *launch)
{
    unsigned count = 1, most = launch->most;
    for (unsigned i = 0; i < batches(inflight); i++) {
        const struct batch *batch = at(inflight, i);
        count += batch->count + batch->pending;
        most = batch->most < most ? batch->most : most;
    }
    return count <= most;
}

/* Whether the launch can be counted in the open batch. A batch holds half of what may be in flight, so that the next one is ready
 * when it ends. */
static int joins(struct inflight *inflight, const struct aim_launch *launch, uint64_t now)
{
    const struct batch *batch = open_batch(inflight);
    uint64_t target = batch_target(launch), left = inflight->free_at > now ? inflight->free_at - now : 0;
    if (batch == NULL || batch->alone || batch->stream != launch->stream || !launch->known)
        return 0;
    if (batch->pending == 0 && now > batch->last_ns + STALE_NS)
        return 0;
    if (batch->count + batch->pending >= batch->limit || batch->key_count == KEYS || !(launch->queues || are_few(inflight, launch)))
        return 0;
    uint64_t together = batch->expected_ns + launch->expected_ns;
    return together <= target / 2 && (launch->queues || inflight->closed == 0 || left + together <= target);
}

/* Whether something in flight is not known, or takes longer than was expected: how long is not known either. */
static int has_unknown(struct inflight *inflight, uint64_t now)
{
    for (unsigned i = 0; i < batches(inflight); i++) {
        const struct batch *batch = at(inflight, i);
        if (batch->abandoned)
            continue;
        if (batch->unknown || (i < inflight->closed && now > batch->due_ns + batch->expected_ns / 4 + LATE_NS))
            return 1;
    }
    return 0;
}

uint64_t aim_room_at(const struct aim_launch *launch, uint64_t now)
{
    struct inflight *inflight = &inflights[launch->device];
    if (joins(inflight, launch, now))
        return now;
    const struct batch *open = open_batch(inflight);
    if (open != NULL) {
        if (open->pending > 0)
            return now + SOON_NS;
        close_batch(launch->driver, inflight, batch_target(launch), now > open->last_ns + STALE_NS, now);
    }
    collect(launch->driver, inflight, launch->share, now);
    if (inflight->closed == 0)
        return now;
    uint64_t target = batch_target(launch), left = inflight->free_at > now ? inflight->free_at - now : 0;
    uint64_t more = !launch->known ? target : launch->expected_ns > target / 2 ? launch->expected_ns : target / 2;
    int unknown = has_unknown(inflight, now);
    if (inflight->closed < RING - 1 && launch->known && left + more <= target && !unknown && are_few(inflight, launch))
        return now;
    /* Short launches: when both batches fit. Long ones: polled shortly before the end is due. What is not known, late or of
     * varying length is polled ever less. */
    uint64_t since = (now - at(inflight, 0)->opened_ns) / 8;
    uint64_t soon = now + (since < SOON_NS ? SOON_NS : since > POLL_NS ? POLL_NS : since);
    if (unknown || at(inflight, 0)->varies)
        return soon;
    soon = now + SOON_NS;
    uint64_t lead = load(&launch->share->region->header.lead_ns);
    if (more < target && target - more > lead)
        lead = target - more;
    return inflight->free_at > soon + lead ? inflight->free_at - lead : soon;
}

/* Whether what is in flight is known and ends soon, and the launch may be queued behind it. */
int aim_inflight_is_short(const struct aim_launch *launch, uint64_t now)
{
    struct inflight *inflight = &inflights[launch->device];
    uint64_t left = aim_inflight_end(launch, now, 0) - now;
    return launch->known && left <= SHORT_NS && !has_unknown(inflight, now) &&
           (aim_higher_all_yield(launch->share) || are_few(inflight, launch));
}

/* Whether one more batch can be counted. */
int aim_inflight_has_slot(int device) { return inflights[device].closed < RING - 1; }

/* Whether nothing finished for so long that work in flight may be waiting for this very launch. One launch is admitted for each
 * bound that passes, and the bound doubles each time: a device that is merely busy must not be taken for one that is stuck. */
int aim_inflight_stalled(const struct aim_launch *launch, uint64_t since, uint64_t now)
{
    struct inflight *inflight = &inflights[launch->device];
    uint64_t room = load(&launch->share->region->header.room_ns), bound;
    room = room < 10000000000u ? room : 10000000000u;
    bound = has_unknown(inflight, now) ? 10 * room : room;
    bound = bound < 10000000000u ? bound : 10000000000u;
    for (unsigned i = 0; i < batches(inflight); i++)
        if (!at(inflight, i)->unknown && 4 * at(inflight, i)->expected_ns > bound)
            bound = 4 * at(inflight, i)->expected_ns;
    if (inflight->progress_ns > since) /* another thread may have seen it after `now` was read */
        since = inflight->progress_ns < now ? inflight->progress_ns : now;
    if (now - since < bound << (inflight->stalls < DOUBLINGS ? inflight->stalls : DOUBLINGS))
        return 0;
    inflight->progress_ns = now;
    inflight->stalls++;
    return 1;
}

static void count_in(struct batch *batch, struct aim_launch *launch)
{
    if (!has_key(batch, &launch->key))
        batch->keys[batch->key_count++] = launch->key;
    batch->beside |= launch->yielded | launch->forced;
    batch->varies |= launch->varies;
    batch->most = batch->most == 0 || launch->most < batch->most ? launch->most : batch->most;
    batch->limit = launch->queues || (launch->most + 1) / 2 > batch->limit ? batch->limit : (launch->most + 1) / 2;
    batch->expected_ns += launch->expected_ns;
    batch->paid_ns += launch->follows ? 0 : launch->expected_ns;
    batch->pending++;
    launch->batch = batch->serial;
}

void aim_inflight_join(struct aim_launch *launch, uint64_t now)
{
    struct inflight *inflight = &inflights[launch->device];
    launch->batch = 0;
    launch->joined_ns = now;
    if (joins(inflight, launch, now)) {
        count_in(open_batch(inflight), launch);
        return;
    }
    struct pair *events = inflight->open || inflight->closed >= RING - 1 ? NULL : take_pair(launch->driver, inflight);
    if (events == NULL)
        return;
    struct batch *batch = at(inflight, inflight->closed);
    *batch = (struct batch){.events = events, .stream = launch->stream, .opened_ns = now, .last_ns = now};
    if (RELAXED(launch->driver, launch->driver->event_record(events->start, launch->stream)) != 0) {
        events->busy = 0;
        return;
    }
    batch->serial = ++inflight->serials;
    batch->unknown = !launch->known;
    batch->alone = launch->most == 1 || launch->expected_ns > batch_target(launch) / 2;
    batch->limit = launch->queues ? QUEUED : (launch->most + 1) / 2;
    inflight->open = 1;
    count_in(batch, launch);
    if (aim_lookahead_is_long(launch->share, launch->expected_ns))
        aim_lookahead_admit(launch->share, launch->expected_ns, now, &batch->admission);
}

uint64_t aim_inflight_launched(struct aim_launch *launch)
{
    struct inflight *inflight = &inflights[launch->device];
    struct batch *batch = open_batch(inflight);
    /* How long the driver's call took matters only where a length is not known. */
    uint64_t now = launch->known && launch->most > 1 ? launch->joined_ns : aim_now();
    if (batch == NULL || launch->batch == 0 || batch->serial != launch->batch)
        return now;
    batch->last_ns = now;
    batch->call_ns += batch->last_ns - launch->joined_ns;
    batch->pending--;
    batch->count++;
    uint64_t target = batch_target(launch);
    if (batch->pending == 0 && (batch->alone || batch->count >= batch->limit || 2 * batch->expected_ns >= target))
        close_batch(launch->driver, inflight, target, 0, now);
    return now;
}

/* After a synchronisation, so that the time of finished work is charged although no launch follows. Left out while another thread
 * has the mutex. That is read from `held`: C libraries before 2.34 have pthread_mutex_trylock in libpthread only, under another
 * version. A thread that takes the mutex in between is waited for, as at a launch. */
void aim_inflight_collect(const struct aim_driver *driver, int device, struct aim_share *share)
{
    if (device < 0 || device >= AIM_DEVICES || !aim_inflight_seen(device) || load(&inflights[device].held))
        return;
    aim_inflight_lock(device);
    aim_depth++;
    collect(driver, &inflights[device], share, aim_now());
    aim_depth--;
    aim_inflight_unlock(device);
}

/* Before a stream is destroyed or begins to be captured: no event of ours may be recorded there afterwards. */
void aim_inflight_stream_ends(const struct aim_driver *driver, void *stream)
{
    for (int device = 0; device < AIM_DEVICES; device++) {
        struct inflight *inflight = &inflights[device];
        if (!aim_inflight_seen(device))
            continue;
        aim_inflight_lock(device);
        aim_depth++;
        if (inflight->open && open_batch(inflight)->stream == stream)
            close_batch(driver, inflight, 0, 0, aim_now());
        aim_depth--;
        aim_inflight_unlock(device);
    }
}

/* Before a context is destroyed: its events go with it. */
void aim_inflight_context_ends(uint64_t context)
{
    for (int device = 0; device < AIM_DEVICES; device++) {
        struct inflight *inflight = &inflights[device];
        aim_inflight_lock(device);
        for (unsigned i = 0; i < batches(inflight); i++) {
            struct batch *batch = at(inflight, i);
            if (batch->events != NULL && batch->events->context == context) {
                batch->abandoned = 1;
                batch->events = NULL;
            }
        }
        if (inflight->open && open_batch(inflight)->abandoned) {
            inflight->open = 0;
            inflight->closed++;
        }
        for (unsigned i = 0; i < PAIRS; i++)
            if (inflight->pairs[i].context == context)
                inflight->pairs[i] = (struct pair){.context = 0};
        aim_inflight_unlock(device);
    }
}
