/* What a tenant leaves to those below it while it works. 0 ppm is the strict gate: nothing. Between, lower tenants together may
 * use that share of the device's time; with 1000000 it holds no one back. The daemon sets it from what the tenant's promises
 * leave free.
 *
 * Processes take turns on the device, and each change of turns costs both of them. So what a lower tenant does beside the other
 * shall be in one piece, and begin when the device has a pause: a launch that is long (the graph of a step) waits for its share
 * of time and then for such a pause. The small ones before and after it may overdraw the share a little. Once they have, they wait
 * until all of it is paid, so that they too pass many at a time. Nothing waits for earlier work of its own tenant, so that the
 * whole step is queued behind the long launch. */
#include "gate.h"

#define FULL_PPM 1000000u
#define FAR_NS 1000000000u /* a time farther ahead is a broken region */
enum { LEAST_PPM = 1000, WINDOW_NS = 5000000, LOOK_NS = 15000, OVERDRAFT_NS = 500000, MOST_LONG_NS = 5000000 };
enum { LIGHT_NS = 150000, PAUSE_WAIT_NS = 3000000, MOST_BURST_NS = 20000000, FILL_NS = 1 };
enum { SILENCE_NS = 1000000000 };
enum { IN_PAUSE, NOT_IN_PAUSE, LIGHT, FILLING };

static uint64_t value_or(const uint64_t *field, uint64_t otherwise)
{
    uint64_t value = load(field);
    return value == 0 || value > FAR_NS ? otherwise : value;
}

int aim_yields_all(const struct aim_tenant *tenant) { return load(&tenant->yield_ppm) >= FULL_PPM; }

static uint64_t share_ppm(const struct aim_tenant *tenant)
{
    uint64_t ppm = load(&tenant->yield_ppm);
    return ppm < LEAST_PPM ? LEAST_PPM : ppm;
}

static int is_higher(const struct aim_share *share, const struct aim_tenant *tenant)
{
    return load(&tenant->state) == AIM_ACTIVE && load(&tenant->rank) > load(&share->tenant->rank) && aim_processes(tenant) > 0;
}

int aim_higher_all_yield(const struct aim_share *share)
{
    for (uint32_t i = 0; i < aim_tenants(share->region); i++)
        if (is_higher(share, &share->region->tenants[i]) && load(&share->region->tenants[i].yield_ppm) == 0)
            return 0;
    return 1;
}

/* Whether it has had neither a request nor work for so long that its next one is not expected right now. */
static int is_silent(const struct aim_header *header, const struct aim_tenant *tenant, uint64_t now)
{
    uint64_t silence = load(&header->silence_ns), last = aim_tenant_last_sign(tenant);
    silence = silence == 0 ? SILENCE_NS : silence;
    return now > last && now - last >= silence && aim_tenant_idle_at(header, tenant, now) <= now;
}

/* Whether work may be queued while the higher tenants are idle: each of them yields a share, or has been silent for long. */
int aim_higher_allow_queue(const struct aim_share *share, uint64_t now)
{
    for (uint32_t i = 0; i < aim_tenants(share->region); i++) {
        const struct aim_tenant *tenant = &share->region->tenants[i];
        if (is_higher(share, tenant) && load(&tenant->yield_ppm) == 0 && !is_silent(&share->region->header, tenant, now))
            return 0;
    }
    return 1;
}

/* Whether a tenant that yields works. Its only request does not until the engine launches for it: what passes until then
 * costs no token. */
static int works(const struct aim_header *header, const struct aim_tenant *tenant, uint64_t now)
{
    return aim_tenant_idle_at(header, tenant, now) > now && (load(&tenant->yield_ppm) == 0 || !aim_tenant_is_preparing(tenant));
}

/* Whether a launch passes beside work of higher tenants, all of which yield a share. */
int aim_yields_now(const struct aim_share *share, uint64_t now)
{
    const struct aim_header *header = &share->region->header;
    int found = 0;
    for (uint32_t i = 0; !found && i < aim_tenants(share->region); i++) {
        const struct aim_tenant *tenant = &share->region->tenants[i];
        found = load(&tenant->yield_ppm) != 0 && is_higher(share, tenant) && !aim_yields_all(tenant) && works(header, tenant, now);
    }
    for (uint32_t i = 0; found && i < aim_tenants(share->region); i++) {
        const struct aim_tenant *tenant = &share->region->tenants[i];
        if (load(&tenant->yield_ppm) == 0 && is_higher(share, tenant) && works(header, tenant, now))
            return 0;
    }
    return found;
}

int aim_yield_bounds_room(const struct aim_share *share) { return load(&share->region->header.yield_room_ns) > 1; }

static uint64_t length_of(const struct aim_header *header, const struct aim_launch *launch)
{
    return launch != NULL && launch->expected_ns != 0 ? launch->expected_ns : load(&header->batch_ns);
}

static uint64_t filled_until(const struct aim_tenant *tenant, uint64_t now)
{
    uint64_t until = load(&tenant->fill_until_ns);
    return until > now && until - now < FAR_NS ? until : now;
}

/* Whether the launch ends before the tenant is expected to launch again: that costs it nothing. */
static int fills_pause(const struct aim_header *header, const struct aim_tenant *tenant, uint64_t length, uint64_t now)
{
    uint64_t left = value_or(&header->fill_ns, FILL_NS), pause = load(&tenant->step_pause_ns), since;
    return left > 1 && aim_tenant_device_idle(tenant, &since) && since + pause > filled_until(tenant, now) + length + left;
}

static int is_light(const struct aim_header *header, const struct aim_launch *launch)
{
    return launch != NULL && launch->expected_ns != 0 && launch->expected_ns <= value_or(&header->light_ns, LIGHT_NS);
}

/* How far ahead of its share a light launch may be: by one long launch and a little more. */
static uint64_t overdraft(const struct aim_header *header, const struct aim_tenant *tenant, const struct aim_launch *launch)
{
    uint64_t longest = load(&launch->share->tenant->longest_launch_ns);
    longest = longest < MOST_LONG_NS ? longest : MOST_LONG_NS;
    return (longest + value_or(&header->overdraft_ns, OVERDRAFT_NS)) * FULL_PPM / share_ppm(tenant);
}

static int in_burst(const struct aim_tenant *tenant, uint64_t now)
{
    uint64_t burst = load(&tenant->yield_burst_ns);
    return burst > now && burst - now <= MOST_BURST_NS;
}

/* `idle`: when the tenant is expected to be idle. Returns when a lower tenant may launch. */
uint64_t aim_yield_at(const struct aim_header *header, const struct aim_tenant *tenant, struct aim_launch *launch,
                      uint64_t idle, uint64_t now)
{
    uint64_t ppm = load(&tenant->yield_ppm), paid = load(&tenant->yield_paid_ns), since = 0;
    if (idle <= now || ppm == 0)
        return idle;
    if (ppm >= FULL_PPM || aim_tenant_is_preparing(tenant) || in_burst(tenant, now) || fills_pause(header, tenant, length_of(header, launch), now))
        return now;
    int light = is_light(header, launch) && !launch->overdrawn;
    if (paid > now && paid - now <= FAR_NS) {
        if (light && paid - now <= overdraft(header, tenant, launch))
            return now;
        if (launch != NULL)
            launch->overdrawn = 1;
        return paid < idle ? paid : idle;
    }
    uint64_t due = launch != NULL && launch->entered_ns > paid ? launch->entered_ns : paid;
    uint64_t wait = value_or(&header->pause_wait_ns, PAUSE_WAIT_NS);
    if (light || wait <= 1 || now - due > wait || aim_tenant_device_idle(tenant, &since))
        return now;
    return now + LOOK_NS;
}

static void charge(struct aim_tenant *tenant, uint64_t length, uint64_t now)
{
    uint64_t cost = (length < FAR_NS ? length : FAR_NS) * FULL_PPM / share_ppm(tenant), old = load(&tenant->yield_paid_ns), from;
    if (cost > FAR_NS / 2)
        cost = FAR_NS / 2;
    do /* unused time is kept for a short while: saved up during a pause it would be a burst at the start of the next request */
        from = old < now - WINDOW_NS || old > now + FAR_NS ? now - WINDOW_NS : old;
    while (!__atomic_compare_exchange_n(&tenant->yield_paid_ns, &old, from + cost, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
}

/* A launch passes beside tenants that yield: it is charged its learned length. What passes while they are idle is not. */
void aim_yield_admitted(const struct aim_launch *launch, uint64_t now)
{
    struct aim_header *header = &launch->share->region->header;
    uint64_t length = length_of(header, launch), burst = value_or(&header->burst_ns, 1), since;
    for (uint32_t i = 0; i < aim_tenants(launch->share->region); i++) {
        struct aim_tenant *tenant = &launch->share->region->tenants[i];
        if (!is_higher(launch->share, tenant) || load(&tenant->yield_ppm) == 0 || aim_yields_all(tenant) ||
            !works(header, tenant, now))
            continue;
        int light = is_light(header, launch), fills = !in_burst(tenant, now) && fills_pause(header, tenant, length, now);
        int kind = fills ? FILLING : light ? LIGHT : aim_tenant_device_idle(tenant, &since) ? IN_PAUSE : NOT_IN_PAUSE;
        add(&header->admitted[kind], 1);
        add(&header->lengths[aim_pause_bucket(length)], 1);
        if (fills) {
            store(&tenant->fill_until_ns, filled_until(tenant, now) + length);
            continue;
        }
        if (!light && burst > 1 && !in_burst(tenant, now))
            store(&tenant->yield_burst_ns, now + burst);
        charge(tenant, length, now);
    }
}
