/* What a tenant leaves to those below it while it works. 0 ppm is the strict gate: nothing. Between, lower tenants together may
 * use that share of the device's time; with 1000000 it holds no one back. The daemon sets it from what the tenant's promises
 * leave free. */
#include "gate.h"

/* BURST_NS: about one step of a model server. With a look at the share before each of its many small launches, the device
 * switched contexts for every one of them: the tenant above lost 14 % and those below gained nothing. */
enum { WINDOW_NS = 5000000, BURST_NS = 6000000, FULL_PPM = 1000000, LEAST_PPM = 1000 };

int aim_yields_all(const struct aim_tenant *tenant) { return load(&tenant->yield_ppm) >= FULL_PPM; }

/* `idle`: when the tenant is expected to be idle. Returns when a lower tenant may launch. */
uint64_t aim_yield_at(struct aim_tenant *tenant, uint64_t idle, uint64_t now)
{
    uint64_t ppm = load(&tenant->yield_ppm), paid = load(&tenant->yield_paid_ns), burst = load(&tenant->yield_burst_ns);
    if (idle <= now || ppm == 0)
        return idle;
    if (ppm >= FULL_PPM || (burst > now && burst - now <= BURST_NS))
        return now;
    if (paid > now && paid - now <= 1000000000u) /* a time farther ahead is a broken region */
        return paid < idle ? paid : idle;
    store(&tenant->yield_burst_ns, now + BURST_NS);
    return now;
}

/* A lower tenant used so much device time. What it used in a pause of the tenant above is not counted: nobody had to yield
 * it. Time that was left unused is kept for a short window only: saved up during a pause
 * it would be a burst at the start of the next request. */
void aim_yield_charge(struct aim_share *share, uint64_t spent, uint64_t now)
{
    uint32_t rank = load(&share->tenant->rank);
    for (uint32_t i = 0; i < aim_tenants(share->region); i++) {
        struct aim_tenant *tenant = &share->region->tenants[i];
        uint64_t ppm = load(&tenant->yield_ppm), old = load(&tenant->yield_paid_ns), from;
        if (ppm == 0 || ppm >= FULL_PPM || load(&tenant->state) != AIM_ACTIVE || load(&tenant->rank) <= rank)
            continue;
        if (aim_tenant_idle_at(&share->region->header, tenant, now) <= now)
            continue;
        uint64_t cost = (spent < 1000000000u ? spent : 1000000000u) * FULL_PPM / (ppm < LEAST_PPM ? LEAST_PPM : ppm);
        do
            from = old < now - WINDOW_NS || old > now + 1000000000u ? now - WINDOW_NS : old;
        while (!__atomic_compare_exchange_n(&tenant->yield_paid_ns, &old, from + cost, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    }
}
