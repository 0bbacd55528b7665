// Package inject knows secrets: the one type that holds them, the sources they
// come from and how they are put into a request. It knows no routes.
//
// It owns
//   - Secret, the only type that secret values live in: it prints as "[redacted]"
//     on every path and Expose is the only way out (CONTRACT C3);
//   - the sources "env" and "file", and the Store that resolves a credential's id;
//   - Template, which renders a secret into a field value, and CheckHeader, which
//     says what fields a secret may be put into.
//
// It promises that no error of this package holds a secret, any byte of one, its
// length beyond the position of one wrong byte, or an unknown credential reference
// (CONTRACT B3, C2), and that a secret which cannot be sent as a field value is
// refused before anything is dispatched (CONTRACT C1). Every failure is an *Error
// whose facts are credential_injection / not_attempted.
//
// It assumes that its callers hand what Expose returns to a transport and to the
// search for reflected secrets (CONTRACT C5), and to nothing else.
package inject
