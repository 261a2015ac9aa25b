/* Admission of long launches. A launch cannot be interrupted, so one that may outlast the pause of a higher tenant starts only
 * if the chance that a request arrives while it runs is covered by an allowance.
 *
 * Every request of the higher tenant adds `allowance_ppm` (default: 5 %) to its budget of touches; a launch spends the
 * probability that it is the one that touches a request, estimated from the histogram of the tenant's pauses. Touches that
 * happened are counted too, so that a wrong estimate cannot exceed the allowance for long. Independently of the budget a launch
 * of length L passes after a wait of 2 L / allowance, so that nothing waits forever, and a tenant without a request for
 * `absent_ns` holds nothing back. */
#include "gate.h"

#define PPM 1000000u
enum { LOOK_NS = 5000000, REQUEST_PART = 25 };

static uint64_t allowance(const struct aim_header *header)
{
    uint64_t ppm = load(&header->allowance_ppm);
    return ppm < 1000 ? 1000 : ppm > PPM ? PPM : ppm;
}

/* Long: longer than a request of the tenant would notice. */
static int is_long_for(const struct aim_header *header, const struct aim_tenant *tenant, uint64_t length)
{
    uint64_t least = load(&header->long_ns), part = aim_tenant_request_ns(tenant) / REQUEST_PART;
    return length > (part > least ? part : least);
}

static int is_higher(const struct aim_share *share, const struct aim_tenant *tenant)
{
    return load(&tenant->state) == AIM_ACTIVE && load(&tenant->rank) > load(&share->tenant->rank) &&
           aim_processes(tenant) > 0 && load(&tenant->yield_ppm) == 0; /* one that yields accepts to be delayed */
}

int aim_lookahead_is_long(const struct aim_share *share, uint64_t length)
{
    for (uint32_t i = 0; length != 0 && i < aim_tenants(share->region); i++)
        if (is_higher(share, &share->region->tenants[i]) &&
            is_long_for(&share->region->header, &share->region->tenants[i], length))
            return 1;
    return 0;
}

/* The longest that a launch of this length waits for higher tenants. Long launches are meant to pass by their allowance: the
 * bound is so long that it adds little to the requests that are touched. */
uint64_t aim_lookahead_bound(const struct aim_share *share, uint64_t length)
{
    const struct aim_header *header = &share->region->header;
    uint64_t starve = load(&header->starve_ns), most = 60000000000u;
    if (!aim_lookahead_is_long(share, length))
        return starve;
    uint64_t bound = length > most / PPM * allowance(header) ? most : 2 * length * PPM / allowance(header);
    return bound > 4 * starve ? bound : 4 * starve;
}

/* Pauses of which at least `from` and less than `to` passed, a part of a bucket counted as a part. */
static double count_pauses(const struct aim_tenant *tenant, uint64_t from, uint64_t to)
{
    double count = 0;
    for (unsigned i = 0; i < AIM_PAUSES; i++) {
        uint64_t low = i == 0 ? 0 : aim_pause_upper(i - 1), high = aim_pause_upper(i);
        uint64_t begin = from > low ? from : low, end = to < high ? to : high;
        uint32_t held = load(&tenant->pauses[i]);
        if (held != 0 && end > begin)
            count += (double)held * ((double)(end - begin) / (double)(high - low));
    }
    return count;
}

/* The probability, in millionths, that a request arrives within `length`, given how long the tenant has been idle. Beyond what
 * was observed, a pause is expected to last about as long again as it has lasted. */
static uint64_t touch_ppm(const struct aim_tenant *tenant, uint64_t length, uint64_t idle)
{
    double longer = count_pauses(tenant, idle, UINT64_MAX), within = count_pauses(tenant, idle, idle + length);
    double unseen = (double)length / (double)(idle + length);
    return (uint64_t)((within + unseen) / (longer + 1) * PPM);
}

static uint64_t idle_time(const struct aim_tenant *tenant, uint64_t now)
{
    uint64_t since = aim_tenant_idle_since(tenant);
    return since != 0 && now > since ? now - since : 0;
}

/* What is left of the tenant's allowance, at most one touch; negative: it is overdrawn. */
static int64_t budget_ppm(const struct aim_header *header, struct aim_tenant *tenant)
{
    uint64_t earned = aim_tenant_requests(tenant) * allowance(header), spent = load(&tenant->spent_ppm);
    if (earned > spent && earned - spent > PPM) {
        uint64_t capped = earned - PPM;
        if (__atomic_compare_exchange_n(&tenant->spent_ppm, &spent, capped, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
            spent = capped;
    }
    uint64_t touched = load(&tenant->touched) * PPM;
    if (touched > earned + PPM)
        return -1; /* more requests were touched than estimated */
    return (int64_t)(earned - spent);
}

static int fits(const struct aim_header *header, struct aim_tenant *tenant, uint64_t length, uint64_t now)
{
    if (!is_long_for(header, tenant, length) || aim_tenant_requests(tenant) == 0)
        return 1;
    uint64_t idle = idle_time(tenant, now);
    return idle > load(&header->absent_ns) || (int64_t)touch_ppm(tenant, length, idle) <= budget_ppm(header, tenant);
}

uint64_t aim_lookahead_at(const struct aim_share *share, uint64_t length, uint64_t now)
{
    for (uint32_t i = 0; length != 0 && i < aim_tenants(share->region); i++) {
        struct aim_tenant *tenant = &share->region->tenants[i];
        if (is_higher(share, tenant) && !fits(&share->region->header, tenant, length, now))
            return now + (length / 8 < LOOK_NS ? length / 8 + 100000 : LOOK_NS);
    }
    return now;
}

void aim_lookahead_admit(const struct aim_share *share, uint64_t length, uint64_t now, struct aim_admission *admission)
{
    const struct aim_header *header = &share->region->header;
    admission->count = 0;
    for (uint32_t i = 0; length != 0 && i < aim_tenants(share->region) && admission->count < 4; i++) {
        struct aim_tenant *tenant = &share->region->tenants[i];
        if (!is_higher(share, tenant) || !is_long_for(header, tenant, length))
            continue;
        uint64_t idle = idle_time(tenant, now);
        if (idle <= load(&header->absent_ns) && aim_tenant_requests(tenant) != 0)
            add(&tenant->spent_ppm, touch_ppm(tenant, length, idle));
        if (aim_tenant_idle_at(header, tenant, now) > now && aim_tenant_requests(tenant) != 0)
            add(&tenant->touched, 1); /* admitted at a bound, beside a request that runs */
        admission->index[admission->count] = i;
        admission->requests[admission->count++] = aim_tenant_requests(tenant);
    }
}

/* Counts the requests that began while a long launch ran. */
void aim_lookahead_finished(const struct aim_share *share, const struct aim_admission *admission, uint64_t ended)
{
    for (unsigned i = 0; i < admission->count; i++) {
        struct aim_tenant *tenant = &share->region->tenants[admission->index[i] % AIM_TENANTS];
        uint64_t begun = aim_tenant_requests(tenant) - admission->requests[i];
        if (begun != 0 && aim_tenant_begun_ns(tenant) > ended)
            begun--; /* it began after the launch, before this was looked at */
        if (begun != 0 && begun < 1000) /* more is a damaged region */
            add(&tenant->touched, begun);
    }
}
