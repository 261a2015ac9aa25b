"""`aimgpu demo`: limits that are seen to hold, by real processes under the interposer as shipped.

`scenes` has one function for each thing that is shown, `manager` what starts tenants and keeps the ledger.
"""
