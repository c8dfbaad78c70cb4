"""Several engines as one: replicas behind a router, and prefill apart from decode. Priced.

Skip it if you want one engine: nothing of the book imports it. There are three answers to "a
prefill disturbs decodes": chunks (SARATHI), phases in time (TD-Pipe), and phases in space. The
third is here: prefill engines run prompts, keys and values go over a link, and decode engines go on
(Splitwise, Patel et al., 2024; DistServe, Zhong et al., 2024).

    routers.py    which engine gets a request
    halves.py     the two halves of a request, and what the memories at both ends keep for it
    fleet.py      the driver: many loops, each with its own clock, on one line of events
    simulate.py   `simulate_fleet`: the priced one
"""
