// Package configs holds the configuration that ships with Waybill: examples, and
// the JSON Schemas of the configuration file and of the envelope. A test of
// internal/config loads every example and validates it against the schema.
package configs

import "embed"

// Example is the commented file that "waybill init" writes as waybill.yaml.
//
//go:embed waybill.yaml
var Example []byte

// Full is a file with every key this version knows.
//
//go:embed full.yaml
var Full []byte

// Agent is an example for a coding agent: model services and git.
//
//go:embed agent.yaml
var Agent []byte

// ConfigSchema is the JSON Schema (2020-12) of waybill.yaml, for editors.
//
//go:embed waybill.schema.json
var ConfigSchema []byte

// EnvelopeSchema is the JSON Schema of the envelope (CONTRACT L1).
//
//go:embed envelope.schema.json
var EnvelopeSchema []byte

// Presets are the files of the presets, presets/NAME.yaml (docs/presets.md).
//
//go:embed presets/*.yaml
var Presets embed.FS
