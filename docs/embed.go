// Package docs embeds the documents that tests read: the contract, the list of
// its rules that are not built yet, and the list of controls. It promises
// nothing about their content; internal/contract and internal/control parse
// them. The product does not import it.
package docs

import _ "embed" // for the documents below

// Contract is contract.md, the numbered rules and the code table.
//
//go:embed contract.md
var Contract string

// ContractUnbuilt is contract-unbuilt.txt, one "RULE issue-subject" a line.
//
//go:embed contract-unbuilt.txt
var ContractUnbuilt string

// Controls is controls.txt, one "GROUP NAME PACKAGE REGEXP" a line.
//
//go:embed controls.txt
var Controls string
