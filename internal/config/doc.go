// Package config reads waybill.yaml. It owns the file's form and nothing of what
// the file means while requests run: the result is plain values for routes and
// inject.
//
// It promises that a file is taken whole or not at all (CONTRACT V1), that every
// problem of a file is reported in one go, each with file, line, column and field
// path, and that nothing is guessed: unknown keys, duplicate keys, further
// documents, values of another kind and settings this version does not have are
// errors. Messages never repeat what stands where a secret could have been pasted
// (CONTRACT C2).
//
// It assumes that the file's author is trusted, but not that the author is careful:
// the work on one file is bounded (size, nodes behind aliases, problems reported).
//
// It is the only importer of gopkg.in/yaml.v3.
package config
