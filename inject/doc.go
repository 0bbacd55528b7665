// Package inject knows secrets: the one type that holds them, the sources they
// come from and how they are put into a request. It knows no routes. Secret
// material leaves it only in the rendered field values that dispatch sends
// (CONTRACT C2, C3).
package inject
