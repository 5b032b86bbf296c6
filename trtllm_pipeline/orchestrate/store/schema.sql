CREATE TABLE artifacts (
  fingerprint TEXT PRIMARY KEY, stage TEXT NOT NULL, label TEXT NOT NULL, files TEXT NOT NULL,
  manifest_bytes INTEGER NOT NULL, size_bytes INTEGER NOT NULL, duration_s REAL NOT NULL, key TEXT NOT NULL,
  published_s REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE attempts (
  id INTEGER PRIMARY KEY, run TEXT NOT NULL, stage TEXT NOT NULL, fingerprint TEXT NOT NULL, number INTEGER NOT NULL,
  started_s REAL NOT NULL, folder TEXT NOT NULL, ended_s REAL, outcome TEXT, failure TEXT, message TEXT, hint TEXT);
CREATE INDEX attempts_by_fingerprint ON attempts (fingerprint);
CREATE TABLE runs (
  number INTEGER PRIMARY KEY, run TEXT NOT NULL UNIQUE, matrix TEXT NOT NULL, command TEXT NOT NULL,
  started_s REAL NOT NULL, ended_s REAL, exit_code INTEGER);
CREATE TABLE latest (
  cell TEXT NOT NULL, stage TEXT NOT NULL, fingerprint TEXT NOT NULL, key TEXT, PRIMARY KEY (cell, stage)) WITHOUT ROWID;
CREATE TABLE peaks (
  attempt INTEGER PRIMARY KEY, label TEXT NOT NULL, system TEXT NOT NULL, expected TEXT NOT NULL, taken TEXT NOT NULL);
CREATE TABLE infeasible (fingerprint TEXT PRIMARY KEY, reason TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE pins (request TEXT PRIMARY KEY, pinned TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE digests (path TEXT PRIMARY KEY, stamp TEXT NOT NULL, digest TEXT NOT NULL) WITHOUT ROWID;
