package inject

import "context"

// FetchRaw asks any source for its material.
func FetchRaw(ctx context.Context, s Source) (Material, error) {
	if r, ok := s.(RawSource); ok {
		return r.FetchRaw(ctx)
	}
	if v, ok := s.(VersionedSource); ok {
		secret, version, err := v.FetchVersion(ctx)
		return Material{Raw: secret.Expose(), Version: version}, err
	}
	secret, err := s.Fetch(ctx)
	return Material{Raw: secret.Expose()}, err
}
