"""The lab that the end-to-end tests and the benchmarks work in. What all of it uses is here; the rest lies below, by what it is for:

    server     PostgreSQL servers, recoveries by them, and other people's tools around them
    standby    standbys, Walrider's and PostgreSQL's, and a client of the early stream
    faults     slow and failing disks and networks, power cuts
    loads      what writes WAL
    oracle     what says whether a result is right

It never talks to a server that it did not start itself, and stops each of them by its own pid.
"""
