"""The load harness against a router: `chiasm load`.

guidellm decides when a request is sent and by which process (`drive`); what is asked comes from `scenarios`, is asked
through `chiasm.AsyncClient` as a customer would (`backend`), and becomes one `Record` a request. `figures` makes
numbers of records, `report` a page. It knows nothing of what stands behind a target.
"""
