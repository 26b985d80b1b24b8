#!/bin/sh
# Makes what a fleet keeps to itself, in a folder that only its owner reads (deploy/secrets). What is there stays.
#
#   deploy/secrets.sh [FOLDER]
set -eu
umask 077
folder=${1:-$(dirname "$0")/secrets}
mkdir -p "$folder"
cd "$folder"

key() { [ -s "$1" ] || openssl rand -hex 32 >"$1"; }
digest() { printf %s "$(cat "$1")" | openssl dgst -sha256 -r | cut -d' ' -f1; }

key workers.key       # tags of entries: encoders and decoders
key tenants.key       # keys of tenants: the router
key ray.token         # whoever has it may run anything on the cluster
key ray-store.key     # likewise: what Ray's control store remembers
key redis-encoder.key
key redis-decoder.key
key redis-cache.key

# Nobody may more than he needs; whoever has no name may say PING.
cat >redis.acl <<END
user default on nopass resetchannels -@all +ping
user chiasm-encoder on #$(digest redis-encoder.key) resetchannels ~chiasm:* -@all +set +get +mget +pttl +pexpire +unlink
user chiasm-decoder on #$(digest redis-decoder.key) resetchannels %R~chiasm:* -@all +get +mget
user chiasm-cache on #$(digest redis-cache.key) resetchannels %W~chiasm:* -@all +scan +unlink
END
cat >ray-store.acl <<END
user default on #$(digest ray-store.key) ~* &* +@all
END
